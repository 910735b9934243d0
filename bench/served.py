"""Runs `peagle-serve` as a subprocess, for measurements and tests, and reads what its processes
use."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.command import RowOptions, option
from bench.presets import preset
from bench.random_server import RandomModel
from peagle_jax.config import ConfigError
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_LISTENS = re.compile(r"^(gRPC|HTTP) listens on (.+:\d+)$", re.MULTILINE)
_MIB = 1 << 20
_TAIL = 2000  # characters of the log that an error shows


class Served:
    """A server on a free port, without HTTP unless the options ask for it; killed at the end of the
    block.

    Args:
      options: of `peagle-serve`; a later option wins over an earlier one.
      log: file for what the server writes.
      module: what is run; it takes options of `peagle-serve`.
      environment: of the process; None inherits that of this process.
      descriptors: most files and connections that it may hold open; None is our own limit.
      prefix: a command that runs it.

    Attributes:
      started: `time.monotonic()` before the process was made.
      address: "host:port" of gRPC, once `wait_for_port` has returned.
      port_seconds, serving_seconds: from the start until `wait_for_port` and `wait` returned.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        log: Path,
        module: str = "serving",
        environment: Mapping[str, str] | None = None,
        descriptors: int | None = None,
        prefix: Sequence[str] = (),
    ):
        self.log = log
        self.address = ""
        self.started = time.monotonic()
        limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}"]
        command = [*prefix, *limit, sys.executable, "-m", module]
        command += ["--port", "0", "--http-port", "-1", *options]
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
        while "gRPC" not in (found := self._listens()):
            self.check(until, "listen")
            time.sleep(0.02)
        self.address = found["gRPC"]
        self.port_seconds = time.monotonic() - self.started
        return self.address

    def wait(self, seconds: float = 600.0) -> str:
        """The address, once the server takes requests; raises as `wait_for_port` does."""
        until = time.monotonic() + seconds
        self.wait_for_port(seconds)
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not _serves(stub):
                self.check(until, "serve")
                time.sleep(0.05)
        self.serving_seconds = time.monotonic() - self.started
        return self.address

    @property
    def http_address(self) -> str:
        """ "host:port" of HTTP, once `wait` has returned; empty if the options asked for none."""
        return self._listens().get("HTTP", "")

    def _listens(self) -> dict[str, str]:
        return dict(_LISTENS.findall(self.text()))

    def stop(self, seconds: float = 120.0) -> int:
        """Sends SIGTERM and returns the exit code.

        Raises:
          subprocess.TimeoutExpired: the server still runs after `seconds`.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def text(self) -> str:
        """The server's output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def check(self, until: float, what: str) -> None:
        """Raises `ConfigError` if the process has ended, or `until` (of `time.monotonic`) is
        past."""
        code = self.process.poll()
        if code is None and time.monotonic() < until:
            return
        how = "took too long" if code is None else f"ended with exit code {code}"
        raise ConfigError(f"peagle-serve {how} and did not {what}; it said: {self.text()[-_TAIL:]}")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(RowOptions):
    """Options of a command that starts a server.

    Args:
      preset: start a server of this full-size model with random weights
      layers: the first N layers of the preset only
      synthetic_acceptance_length: accept as many drafts of the preset's head as give X tokens per
        round on average
      seed: seed of the traffic, and of random weights
      serve_options: options of peagle-serve
    """

    preset: str | None = None
    layers: int | None = None
    synthetic_acceptance_length: float | None = None
    seed: int = option(0, type=int)
    serve_options: tuple[str, ...] = option((), positional=True, nargs="*", metavar="-- OPTION")

    def check(self) -> None:
        super().check()
        if self.preset is not None:
            preset(self.preset, self.layers)
            return
        for name in ("layers", "synthetic_acceptance_length"):
            if getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs a --preset")

    @property
    def random_model(self) -> RandomModel:
        """The model of a server with a preset."""
        return RandomModel(
            preset=self.preset,
            layers=self.layers,
            synthetic_acceptance_length=self.synthetic_acceptance_length,
            seed=self.seed,
        )

    def start(self, options: Sequence[str], log: Path) -> Served:
        """A server with options of `peagle-serve`; raises ConfigError for those that are wrong."""
        resolve(options)
        if self.preset is None:
            return Served(options, log=log)
        random = [*self.random_model.options, *options]
        return Served(random, log=log, module="bench.random_server")


def wait_for_programs(address: str) -> pb.GetStatsResponse:
    """What the server says once it has compiled all batch sizes."""
    with grpc.insecure_channel(address) as channel:
        stub = GenerationStub(channel)
        while (stats := stub.GetStats(pb.GetStatsRequest())).batch_sizes_pending:
            time.sleep(0.1)
        return stats


def stat_fields(stat: Path) -> list[str]:
    """Fields of /proc/PID/stat from the third one on."""
    return stat.read_text().rpartition(")")[2].split()


def cpu_seconds(fields: Sequence[str]) -> float:
    """Processor time of a process or a thread, from `stat_fields`."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serves(stub: health_pb2_grpc.HealthStub) -> bool:
    with contextlib.suppress(grpc.RpcError):
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


@dataclass(frozen=True, kw_only=True)
class Process:
    """What a process holds and has used.

    Attributes:
      role: "engine" with jax, "api" with gRPC, "engine and api" with both; the name of another
        program.
    """

    role: str
    cpu_seconds: float
    resident_bytes: int


def processes(root: int) -> dict[int, Process]:
    """The process `root` and all its descendants that live, by id."""
    children: dict[int, list[int]] = {}
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat_fields(folder / "stat")
            stats[int(folder.name)] = fields
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = {}, [root]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        with contextlib.suppress(OSError):
            found[pid] = _process(pid, stats[pid])
    return found


def _process(pid: int, stat: list[str]) -> Process:
    folder = Path(f"/proc/{pid}")
    maps = (folder / "maps").read_text()
    held = (("engine", "/jaxlib/"), ("api", "/grpc/_cython/"))
    roles = [role for role, library in held if library in maps]
    return Process(
        role=" and ".join(roles) or (folder / "comm").read_text().strip(),
        cpu_seconds=cpu_seconds(stat),
        resident_bytes=int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def used(before: Mapping[int, Process], now: Mapping[int, Process]) -> list[dict]:
    """Row fields of each process that lives: its memory, and the processor time since `before`."""
    return [
        {
            "role": one.role,
            "resident_mib": one.resident_bytes / _MIB,
            "cpu_seconds": one.cpu_seconds - (before[pid].cpu_seconds if pid in before else 0.0),
        }
        for pid, one in now.items()
    ]
