"""The smg gateway in front of servers."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def running_gateway(
    addresses: Sequence[str], folder: Path, model: str, *options: str
) -> Iterator[str]:
    """The base URL of a gateway that has only the servers' addresses and no network."""
    port, metrics_port = free_ports(2)
    log = folder / "log"
    urls = " ".join(f"grpc://{address}" for address in addresses)
    program = Path(sys.executable).with_name("smg")
    own = f"launch --host 127.0.0.1 --port {port} --worker-urls {urls}"
    own += f" --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
    command = [str(program), *own.split(), *options]
    with log.open("w") as out:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        wait_for_model(url, model, process, log)
        assert "Fetching tokenizer from worker" in log.read_text()
        yield url
    finally:
        process.kill()  # asked to end, it waits five seconds for its clients
        process.wait()


def wait_for_model(url: str, model: str, process: subprocess.Popen, log: Path) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(300):
            assert process.poll() is None, log.read_text()
            try:
                if [one.id for one in client.models.list()] == [model]:
                    client.completions.create(prompt="a", model=model, max_tokens=1)
                    return
            except openai.APIError:
                pass  # not up, or still fetching the tokenizer
            time.sleep(0.2)
    pytest.fail(f"the gateway did not find the server: {log.read_text()}")
