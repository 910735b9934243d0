"""`peagle-bench conversion`: a checkpoint of random bytes, copied and converted; speed and peak memory.

Both read the same files from disk and write to the same disk, and both end with fsync.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench import rows
from bench.commands.conversion import Options
from peagle_jax.config import ConfigError

_LAST_LINE = re.compile(r"([\d.]+) s, [\d.]+ GB/s, peak memory ([\d.]+) GB")


def _convert(*arguments: object) -> str:
    """Output of one `peagle-convert` command, run in a new process, so that peak memory is its own."""
    command = [sys.executable, "-m", "convert", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command[2:])}: {done.stderr.strip()}")
    return done.stdout


def evict(folder: Path) -> None:
    """Evicts the folder's files from the page cache, so that they are read from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy(source: Path, folder: Path) -> float:
    """Seconds of a plain copy with fsync."""
    start = time.perf_counter()
    shutil.copytree(source, folder)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def conversion(options: Options) -> dict:
    """Makes, copies, converts and verifies one checkpoint below `options.folder`; appends a row.

    Raises:
      ConfigError: the folder exists, or a command failed.
    """
    work = options.folder
    if work.exists():
        raise ConfigError(f"{work} exists; name a new folder on the disk to measure")
    source, copied, made = (work / name for name in ("source", "copy", "converted"))
    try:
        work.mkdir(parents=True)
        layers = ["--layers", options.layers] if options.layers else []
        form = ["--quantization", options.quantization, *layers]
        _convert("synthetic", options.preset, source, *form)
        nbytes = sum(path.stat().st_size for path in source.iterdir())
        evict(source)
        copy_seconds = _copy(source, copied)
        shutil.rmtree(copied)
        evict(source)
        seconds, peak = map(float, _LAST_LINE.search(_convert("convert", source, made)).groups())
        verdict = _convert("verify", source, made, "--no-logits").splitlines()[0]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    row = {
        "kind": "conversion",
        "model": options.preset,
        "weights": options.quantization,
        "layers": options.layers,
        "bytes": nbytes,
        "seconds": seconds,
        "gigabytes_per_second": nbytes / 1e9 / seconds,
        "copy_gigabytes_per_second": nbytes / 1e9 / copy_seconds,
        "ratio_to_copy": copy_seconds / seconds,
        "peak_memory_gigabytes": peak,
        "verdict": verdict,
    }
    row = rows.rounded(row | rows.environment(options.commit))
    rows.append(options.out, row)
    return row
