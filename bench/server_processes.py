"""Memory, processor time and share of the interpreter's lock of each process of a server, from /proc and py-spy."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SAMPLES = 100  # a second
_MOST_SECONDS = 3600  # of one recording
_END_SECONDS = 30.0  # for py-spy to write its file
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Process:
    """What a process holds and has used.

    Attributes:
      role: "engine" with jax, "api" with gRPC, "engine and api" with both; the name of another program.
    """

    role: str
    is_python: bool
    cpu_seconds: float
    resident_bytes: int


def processes(root: int) -> dict[int, Process]:
    """The process `root` and all its descendants that live, by id."""
    children: dict[int, list[int]] = {}
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
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
        is_python="python" in os.readlink(folder / "exe"),
        cpu_seconds=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
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


class LockShares:
    """Records which share of the time some processes hold their interpreter's lock, from its making on.

    py-spy stops a process for each sample, so a measured load is a little slower meanwhile.
    """

    def __init__(self, some: Mapping[int, Process], folder: Path):
        self.note = "" if shutil.which("py-spy") else "py-spy is not on PATH"
        self._some = {pid: one for pid, one in some.items() if one.is_python and not self.note}
        self._begin = time.perf_counter()
        self._files = {pid: folder / f"lock_{pid}" for pid in self._some}
        self._recordings = {
            pid: subprocess.Popen(
                ["py-spy", "record", "--gil", "--format=raw", f"--rate={_SAMPLES}", f"--pid={pid}",
                 f"--duration={_MOST_SECONDS}", f"--output={file}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )
            for pid, file in self._files.items()
        }  # fmt: skip

    def end(self) -> list[dict]:
        """The share of each process; None where py-spy failed."""
        seconds = time.perf_counter() - self._begin
        found = []
        for pid, recording in self._recordings.items():
            recording.send_signal(signal.SIGINT)
            try:
                recording.wait(_END_SECONDS)
                lines = self._files[pid].read_text().splitlines()
            except (subprocess.TimeoutExpired, OSError):
                recording.kill()
                recording.wait()
                found.append({"role": self._some[pid].role, "share": None})
                continue
            count = sum(int(line.rpartition(" ")[2]) for line in lines)
            found.append({"role": self._some[pid].role, "share": count / (_SAMPLES * seconds)})
        return found
