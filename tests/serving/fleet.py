"""Servers as processes behind the smg gateway, and clients that send all the time."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.served import Served
from peagle_jax.checkpoint import save_head, save_target
from peagle_jax.models import Decoder
from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny
from tests.serving.gateway import running_gateway
from tests.waiting import LIMIT, eventually

MODEL = "tiny"
MAX_POSITION = 256
GREEDY = dict(temperature=0, ignore_eos=True)
SIZES = (
    "--max-num-seqs 2 --max-model-len 256 --prefill-chunk 32 --num-speculative-tokens 3 "
    "--adaptive off --max-connection-seconds 2"
)
"""So that it starts soon. Each connection ends after two seconds: no request may notice."""
GATEWAY = (
    "--health-check-interval-secs 1 --worker-startup-check-interval 1 --load-monitor-interval 1 "
    "--retry-max-retries 10 --retry-initial-backoff-ms 200 --disable-circuit-breaker"
)
"""The gateway notices the state of a server sooner than by default, and retries until it has: it
sends a request again to the server that has its prefix, as long as three checks in a row have not
failed. The failures would open its circuit breaker for a minute, also after the server has
returned."""
_POLL = 0.1  # seconds between two looks at the gateway, or at a log
_PAUSE = 0.3  # seconds between two requests of a client of `Load`, so that servers start soon


def save_model(folder: Path, target: Decoder, tokenizer: Tokenizer) -> list[str]:
    """Writes a target, its tokenizer and a head; returns the options of a server that name them."""
    save_target(target, folder / "target", dtype="float32")
    shutil.copytree(tokenizer.folder, folder / "target", dirs_exist_ok=True)
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER)
    save_head(head, folder / "head", max_position=MAX_POSITION, dtype="float32")
    return ["--model", str(folder / "target"), "--drafter", str(folder / "head")]


class Replica:
    """One server of a fleet; its later processes have its port, as a restarted container has."""

    def __init__(self, folder: Path, model: Sequence[str]):
        self._folder, self._model = folder, model
        self._logs: list[Path] = []
        self._port = "0"
        self.start()
        self.address = self.process.wait(LIMIT)
        self._port = self.address.rpartition(":")[2]

    def start(self) -> None:
        """Starts a process, which does not serve yet."""
        self._logs.append(self._folder / f"{len(self._logs)}.log")
        self._folder.mkdir(exist_ok=True)
        options = (*self._model, "--served-model-name", MODEL, "--no-cache", "--port", self._port)
        mine = {name: value for name, value in os.environ.items() if not name.startswith("PEAGLE_")}
        self.process = Served([*options, *SIZES.split()], log=self._logs[-1], environment=mine)

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        self.process.__exit__()

    @property
    def completed(self) -> int:
        """Requests that all its processes have completed, by their logs."""
        lines = [line for log in self._logs for line in log.read_text().splitlines()]
        found = [json.loads(line) for line in lines if '"message": "request"' in line]
        return sum(one["status"] == "OK" for one in found)


class Fleet:
    """Two servers and a gateway.

    Args:
      model: options of the servers that name their model.

    Attributes:
      url: of the gateway.
      replicas: the servers.
    """

    def __init__(self, folder: Path, model: Sequence[str]):
        self.replicas: list[Replica] = []
        with ExitStack() as started:  # ends the servers if the gateway does not start
            for i in range(2):  # one after the other: the second finds the programs of the first
                self.replicas.append(Replica(folder / str(i), model))
                started.callback(self.replicas[i].kill)
            addresses = [one.address for one in self.replicas]
            gateway = running_gateway(addresses, folder, MODEL, *GATEWAY.split())
            self.url = started.enter_context(gateway).removesuffix("/v1")
            self.client = httpx.Client(base_url=self.url, timeout=LIMIT)
            started.enter_context(self.client)
            self.wait_until_ready()
            self._stack = started.pop_all()

    def close(self) -> None:
        """Ends all processes."""
        self._stack.close()

    def statuses(self) -> list[str]:
        """What the gateway says of each server, such as "ready"."""
        workers = self.client.get("/workers").json()["workers"]
        found = {one["url"].removeprefix("grpc://"): one["status"] for one in workers}
        return [found.get(one.address, "unknown") for one in self.replicas]

    def wait_until_ready(self) -> None:
        """Returns once the gateway sends requests to every server."""
        self.wait(lambda: self.statuses() == ["ready"] * 2, "both servers are ready")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """`eventually` for what the gateway or the logs say."""
        eventually(condition, what, every=_POLL)

    @property
    def completed(self) -> list[int]:
        """Requests that each server has completed."""
        return [one.completed for one in self.replicas]

    def post(self, route: str, **body) -> dict:
        """The answer to a request that must succeed."""
        response = self.client.post(route, json=dict(model=MODEL, **GREEDY) | body)
        assert response.status_code == 200, response.text
        return response.json()


@dataclass(frozen=True)
class Outcome:
    """How a request ended: its prompt, its whole text, or why there is none.

    Attributes:
      was_streamed: whether the client had asked for a stream.
    """

    prompt: str
    was_streamed: bool
    text: str | None
    error: str = ""


class Load:
    """Clients that send one request after the other, each always the same one, until `stop`.

    Attributes:
      outcomes: of the requests that have ended, in order.
    """

    def __init__(self, url: str, prompts: Iterable[str], *, max_tokens: int):
        self.outcomes: list[Outcome] = []
        self._url, self._max_tokens = url, max_tokens
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(prompt, i % 2 == 1), daemon=True)
            for i, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def stop(self) -> None:
        """Sends nothing more, and waits until all requests have ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()

    def wait_for(self, more: int) -> None:
        """Returns once so many more requests have ended."""
        wanted = len(self.outcomes) + more
        eventually(lambda: len(self.outcomes) >= wanted, f"{more} more requests have ended")

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.text is None]

    def _run(self, prompt: str, is_stream: bool) -> None:
        options = dict(model=MODEL, prompt=prompt, max_tokens=self._max_tokens, stream=is_stream)
        body = options | GREEDY
        with httpx.Client(base_url=self._url, timeout=LIMIT) as client:
            while not self._is_over.wait(_PAUSE):
                try:
                    response = client.post("/v1/completions", json=body)
                    text, error = _read(response, is_stream)
                except httpx.HTTPError as broken:
                    text, error = None, repr(broken)
                self.outcomes.append(Outcome(prompt, is_stream, text, error))


def _read(response: httpx.Response, is_stream: bool) -> tuple[str | None, str]:
    """The text of an answer, and the error in its place if there is one."""
    if response.status_code != 200:
        return None, response.text
    if not is_stream:
        return response.json()["choices"][0]["text"], ""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data[-1] == "[DONE]", data[-1:]
    chunks = [json.loads(one) for one in data[:-1]]
    if errors := [one["error"]["message"] for one in chunks if "error" in one]:
        return None, errors[0]
    return "".join(choice["text"] for one in chunks for choice in one["choices"]), ""
