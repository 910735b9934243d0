"""The processes of a server that runs as a subprocess, found in /proc."""

import contextlib
import os
import signal
from pathlib import Path

import grpc

from bench.served import Served
from serving.protos import peagle_v1_pb2_grpc
from tests.waiting import eventually

_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Processes:
    """The children of a server.

    Attributes:
      main, engine: process ids.
      renderer: that of the process that renders chats of the first one; 0 if there is none.
    """

    def __init__(self, server: Served):
        self.main = server.process.pid
        self.engine, self.renderer = 0, 0
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if _parent(int(folder.name)) == self.main:
                    command = (folder / "cmdline").read_text()
                    if "serving.engine_process" in command:
                        self.engine = int(folder.name)
                    elif "text_process" in command:
                        self.renderer = int(folder.name)
        assert self.engine, "the server has no process of the engine"

    @property
    def all(self) -> list[int]:
        return [self.main, self.engine]

    def wait_until_gone(self) -> None:
        """Returns once all children have ended."""
        eventually(lambda: not any(map(is_running, self.all[1:])), "the children have ended")


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and has not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def stopped(pid: int):
    """Within the block a process does not run."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def connections(address: str, count: int):
    """Stubs with a connection each."""
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=_OWN_CONNECTION))
            for _ in range(count)
        ]
        yield [peagle_v1_pb2_grpc.GenerationStub(one) for one in channels]
