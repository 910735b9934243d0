"""`peagle-serve` in a process of its own, for measurements and tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peagle_jax.config import ConfigError

_LISTENS = re.compile(r"^gRPC listens on (.+:\d+)$", re.MULTILINE)
_TAIL = 2000  # characters of the log that an error shows


class Served:
    """A server on a free port, without HTTP unless the options say otherwise; killed on the way out.

    Args:
      options: of `peagle-serve`; a later option wins over an earlier one.
      log: file for what the server writes.
      environment: of the process; None is ours.

    Attributes:
      started: `time.monotonic()` before the process was made.
      address: "host:port" of gRPC, once `wait_for_port` has returned.
    """

    def __init__(
        self, options: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ):
        self.log = log
        self.address = ""
        self.started = time.monotonic()
        command = [sys.executable, "-m", "serving", "--port", "0", "--http-port", "-1", *options]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for_port(self, seconds: float = 120.0) -> str:
        """The address, once the server listens there.

        Raises:
          ConfigError: it ended before, or took longer than `seconds`.
        """
        until = time.monotonic() + seconds
        while not (found := _LISTENS.search(self.text())):
            self._check(until, "listen")
            time.sleep(0.02)
        self.address = found[1]
        return self.address

    def wait(self, seconds: float = 600.0) -> str:
        """The address, once the server takes requests; raises as `wait_for_port` does."""
        until = time.monotonic() + seconds
        self.wait_for_port(seconds)
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not _serves(stub):
                self._check(until, "serve")
                time.sleep(0.05)
        return self.address

    def stop(self, seconds: float = 120.0) -> int:
        """Sends SIGTERM and returns the exit code.

        Raises:
          subprocess.TimeoutExpired: the server still runs after `seconds`.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the process has used, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _check(self, until: float, what: str) -> None:
        code = self.process.poll()
        if code is None and time.monotonic() < until:
            return
        how = "took too long" if code is None else f"ended with exit code {code}"
        raise ConfigError(f"peagle-serve {how} and did not {what}; it said: {self.text()[-_TAIL:]}")


def _serves(stub: health_pb2_grpc.HealthStub) -> bool:
    with contextlib.suppress(grpc.RpcError):
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False
