"""Rows: one JSON line per measurement, with everything needed to repeat it."""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax

from peagle_jax.cores import num_cores

HERE = Path(__file__).parent
DATA = HERE / "data"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "CPU"


def device_name() -> str:
    """The default device: a GPU's product name, or the CPU's with its number of cores in use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"{_cpu_name()}, {num_cores()} cores"


def git_sha() -> str:
    """Commit of this checkout, "+" when tracked files differ from it; "unknown" without git."""
    git = lambda *args: subprocess.run(
        ["git", "-C", str(HERE), *args], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        sha = git("rev-parse", "--short=12", "HEAD")
        return sha + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """The command line, quoted for a shell."""
    is_lab = Path(sys.argv[0]).parent.name == "lab"
    return shlex.join([*(("python", "-m", "lab") if is_lab else ("peagle-bench",)), *sys.argv[1:]])


def environment(sha: str | None) -> dict:
    """Fields that all rows of one command share.

    Args:
      sha: the commit, for a machine without git; None: read from git.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(),
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "python": platform.python_version(),
        "sha": sha or git_sha(),
        "command": command(),
    }


def append(path: Path, row: dict) -> None:
    """Appends a row immediately, so that an interrupted sweep keeps its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rounded(row: dict) -> dict:
    """Rounds floats to five significant digits, for readability."""
    if isinstance(row, dict):
        return {key: rounded(value) for key, value in row.items()}
    if isinstance(row, list):
        return [rounded(value) for value in row]
    return float(f"{row:.5g}") if isinstance(row, float) else row
