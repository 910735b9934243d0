"""Load on a served full-size model: clients, the bare engine beside, tables of the rows."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.__main__ import main
from bench.load_clients import Call, Clients, Outcome, figures, gap_figures, http_body
from bench.random_server import in_child, save_tokenizer
from bench.serve_load import Options, calls
from bench.timing import drive
from peagle_jax import SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.text.tokenizer import Tokenizer
from serving.protos import peagle_v1_pb2 as pb
from tests.suite import CHEAP

ROOT = Path(__file__).parents[2]


COMMAND = (
    "serve-load --preset qwen3-0.6b --layers 1 --no-cache --synthetic-acceptance-length 2.5"
    " --protocols grpc,http --concurrency 2 --num-requests 6"
    " --prompt-tokens 24 --max-tokens 20 --sha abc --out OUT -- --max-model-len 64"
    " --num-speculative-tokens 3 --adaptive off --prefill-chunk 32"
)


@pytest.mark.slow
def test_a_served_preset_has_rows_of_both_protocols_beside_the_bare_engine(tmp_path):
    out = tmp_path / "rows.jsonl"
    paths = f"{ROOT / 'tests' / 'bench' / 'small_presets'}{os.pathsep}{ROOT}"
    mine = os.environ | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}
    mine |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": CHEAP}
    command = [sys.executable, "-m", "bench", *COMMAND.replace("OUT", str(out)).split()]
    made = subprocess.run(command, env=mine, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["protocol"] for one in rows] == ["grpc", "http"]
    for one in rows:
        assert (one["kind"], one["model"]) == ("served", "qwen3-0.6b (1 of 2 layers)")
        assert (one["codes"], one["tokens"], one["max_num_seqs"]) == ({"OK": 6}, 120, 2)
        assert 2 < one["acceptance_length"] <= 3
        assert 0 < one["port_seconds"] < one["serving_seconds"] < one["programs_seconds"]
        assert 0 < one["gap_ms"]["p50"] <= one["gap_ms"]["max"]
        assert 0 < one["gap_max_at"] < one["seconds"]
        assert one["ttft_ms"]["p50"] > 0 < one["tpot_ms"]["p90"]
        assert sum(process["resident_mib"] for process in one["processes"]) > 50
        speeds = one["tokens_per_second"], one["bare_tokens_per_second"]
        assert one["served_over_bare"] == pytest.approx(speeds[0] / speeds[1], rel=1e-3)
        assert 2 < one["bare_acceptance_length"] <= 3
    assert "6 OK" in made.stdout


def test_processes_that_serve_ports_and_clients_need_no_jax():
    modules = "bench.__main__, bench.load_clients, bench.random_server"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = b'data: {"choices": [{"text": "ab", "token_ids": [3]}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"
FAILED, END = b'data: {"error": {}}\n\n', b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = HEAD + chunk(TOKENS) + chunk(TOKENS) + chunk(USAGE) + chunk(DONE) + END
ANSWERS = {
    "whole": ([WHOLE, WHOLE], ["OK", "OK"], [7, 7]),
    "in pieces": ([WHOLE[i : i + 9] for i in range(0, len(WHOLE), 9)], ["OK"], [7]),
    "refused": ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 0\r\n\r\n"], ["HTTP 429"], [0]),
    "cut short": ([HEAD + chunk(TOKENS)], ["LOST"], [1]),
    "failed": ([HEAD + chunk(TOKENS) + chunk(FAILED) + chunk(DONE) + END], ["ERROR"], [1]),
}


def answer(listener: socket.socket, texts: Iterable[bytes], num_requests: float) -> None:
    """Answers each request of a connection with the next text, or one with all of them."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):  # the client has gone
        for index, text in enumerate(texts):
            if index < num_requests:
                connection.recv(65536)
            connection.sendall(text)


def test_a_client_of_http_reads_streams_of_one_connection():
    request = pb.GenerateRequest(stopping=pb.Stopping(max_tokens=7))
    request.tokens.ids.extend([1, 2])
    with Clients(6) as clients:
        for name, (texts, codes, counts) in ANSWERS.items():
            with socket.create_server(("127.0.0.1", 0)) as listener:
                given = listener, texts, len(codes)
                thread = threading.Thread(target=answer, args=given, daemon=True)
                thread.start()
                address = "{}:{}".format(*listener.getsockname())
                todo = [Call(request=request)] * len(codes)
                found = clients.load(todo, address=address, protocol="http", concurrency=1)
                thread.join()
            outcomes = found.outcomes
            assert [one.code for one in outcomes] == codes, name
            assert [one.num_tokens for one in outcomes] == counts, name
            assert all(len(one.arrivals) >= (one.code == "OK") for one in outcomes)
            # Greedy texts are compared by their tokens.
            assert all(list(one.tokens) == [3, 3] for one in outcomes if one.code == "OK")
    body = json.loads(http_body(request))
    assert (body["prompt"], body["return_token_ids"]) == ([1, 2], True)
    request.sampling.temperature = 1.0
    assert not json.loads(http_body(request))["return_token_ids"]


def test_clients_make_their_calls_again_until_the_time_is_over():
    with Clients(1) as clients, socket.create_server(("127.0.0.1", 0)) as listener:
        texts = itertools.repeat(WHOLE)
        thread = threading.Thread(target=answer, args=(listener, texts, math.inf), daemon=True)
        thread.start()
        address = "{}:{}".format(*listener.getsockname())
        where = dict(address=address, protocol="http", concurrency=1)
        found = clients.load([Call(request=pb.GenerateRequest())], seconds=0.2, **where)
    assert len(found.outcomes) > 1
    assert {one.code for one in found.outcomes} == {"OK"}
    assert found.seconds >= 0.2


def test_client_processes_end_with_the_load():
    before = set(multiprocessing.active_children())
    with Clients(2) as clients:
        clients._start(2)
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2
    for process in started:
        process.join()
        assert process.exitcode == 0


def test_the_longest_gap_is_that_of_any_stream_and_has_a_time():
    one, other = Outcome(sent=10.0), Outcome(sent=10.0)
    one.arrivals = array("d", [10.0, 10.1, 10.2])
    other.arrivals = array("d", [10.0, 12.5])
    found = gap_figures([one, other, Outcome(sent=10.0)], 10.0)
    assert found["gap_ms"]["p50"] == pytest.approx(100)
    assert (found["gap_ms"]["max"], found["gap_max_at"]) == pytest.approx((2500, 2.5))
    assert gap_figures([Outcome(sent=1.0)], 0.0) == {"gap_ms": None, "gap_max_at": None}


@pytest.mark.parametrize("vocab_size", [256, 151936])
def test_each_made_up_token_has_a_text_of_its_own(tmp_path, vocab_size):
    save_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == vocab_size
    texts = {tokenizer.bytes_of(token) for token in range(vocab_size)}
    assert len(texts) == vocab_size
    assert tokenizer.decode(tokenizer.encode("def é\n")) == "def é\n"


CLOCK = [0.0]


class IdleEngine:
    """Ends each request in the step after it came, and notes when it came."""

    def __init__(self):
        self.came: list[float] = []
        self.scheduler = SimpleNamespace(active=[])
        self._open: list = []

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add_request(self, prompt, params):
        times = dict(arrival_time=0.0, first_token_time=0.0, finish_time=1.0)
        ended = dict(output=[1], is_finished=True, error=None, rounds=1)
        self._open.append(SimpleNamespace(prompt=prompt, **ended, **times))
        self.came.append(drive_clock())
        return self._open[-1]

    def step(self):
        done, self._open = self._open, []
        return [(request, [1]) for request in done]


def drive_clock() -> float:
    return CLOCK[0]


def test_prompts_with_times_are_not_given_to_the_engine_before(monkeypatch):
    CLOCK[0] = 100.0
    sleep = lambda seconds: CLOCK.__setitem__(0, CLOCK[0] + seconds)
    monkeypatch.setattr("bench.timing.time", SimpleNamespace(perf_counter=drive_clock, sleep=sleep))
    engine = IdleEngine()
    drive(engine, [[1]] * 3, SamplingParams(), concurrency=3, starts=[0.0, 0.5, 2.0])
    assert engine.came == pytest.approx([100.0, 100.5, 102.0])


def test_what_a_child_raises_is_raised_here():
    assert in_child(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_child(divmod, 1, 0)
    with pytest.raises(ConfigError, match="without a result"):
        in_child(sys.exit, 3)


def outcome(code: str = "OK", *, ttft: float = 0.1, per_token: float = 0.01, tokens: int = 11):
    """A request sent at 100 s."""
    first = 100 + ttft
    counts = dict(rounds=5, emitted=10, drafted=14, accepted=6)
    counts |= dict(accepted_per_position=[4, 2, 0], drafted_per_position=[5, 5, 4])
    times = dict(sent=100.0, first=first, last=first + per_token * (tokens - 1))
    return Outcome(code=code, tokens=[5] * tokens, acceptance=pb.Acceptance(**counts), **times)


def test_figures_are_of_what_ended_well():
    slow, late = outcome(per_token=0.1), outcome(ttft=0.6)
    cancelled = outcome("CANCELLED", ttft=9.0, tokens=3)
    refused = Outcome(sent=100.0, code="RESOURCE_EXHAUSTED")
    row = figures([outcome(), outcome(), slow, late, cancelled, refused], 2.0)
    assert row["codes"] == {"CANCELLED": 1, "OK": 4, "RESOURCE_EXHAUSTED": 1}
    assert (row["requests"], row["tokens"]) == (6, 47)
    assert row["tokens_per_second"] == 23.5
    assert row["requests_per_second"] == 2.0
    assert row["ttft_ms"]["p99"] < 1000  # not of the cancelled one
    assert row["acceptance_length"] == pytest.approx(10 / 5)
    assert row["acceptance_per_position"] == [0.8, 0.4, 0.0]


def test_arrivals_are_poisson_from_the_seed():
    options = Options(preset="qwen3-0.6b", seed=3, max_tokens=8)
    made = calls(options, [[7], [5, 6]], 2000, rate=50.0)
    again = calls(options, [[7], [5, 6]], 2000, rate=50.0)
    assert [call.start for call in made] == [call.start for call in again]
    gaps = np.diff([call.start for call in made])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)  # an exponential's, as its mean
    assert list(made[1].request.tokens.ids) == [5, 6]


def test_a_load_of_minutes_has_mixed_lengths():
    options = Options(preset="qwen3-0.6b", minutes=1, prompt_tokens=12, max_tokens=8)
    made = calls(options, [[7] * 12], 200)
    assert {len(call.request.tokens.ids) for call in made} == set(range(4, 13))
    assert {call.request.stopping.max_tokens for call in made} == set(range(3, 9))


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    out = ["--out", str(tmp_path / "rows.jsonl"), "--sha", "abc", "--no-cache"]
    assert main(["serve-load", *out, "--preset", "qwen9"]) == 2
    assert "unknown preset" in capsys.readouterr().err
    argv = ["--preset", "qwen3-0.6b", *out, "--", "--model", str(tmp_path / "nowhere")]
    assert main(["serve-load", *argv]) == 2
    assert "nowhere" in capsys.readouterr().err
