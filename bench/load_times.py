"""`peagle-bench load-times`: seconds from files to a model on the device, and the memory of the host.

Each load is a new process, which has no memory from an earlier one. It starts the device before the clock.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench import rows
from bench.commands.load_times import Options
from bench.conversion import evict
from bench.presets import preset
from convert.synthetic import write_synthetic
from peagle_jax.config import ConfigError

_READ_BYTES = 8 << 20
_SAMPLE_SECONDS = 0.01


def load_times(options: Options) -> list[dict]:
    """Makes a checkpoint in `options.folder` and loads it twice; appends a row each.

    Raises:
      ConfigError: the folder exists, or a process failed.
    """
    work, chosen = options.folder, preset(options.preset, options.layers)
    if work.exists():
        raise ConfigError(f"{work} exists; name a new folder on the disk to measure")
    form = "none" if chosen.format == "bf16" else chosen.format
    try:
        work.mkdir(parents=True)
        folder = work / "source"
        write_synthetic(folder, chosen.target, quantization=form)
        measured = [_measured(folder, options, is_cold=cold) for cold in (True, False)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    common = {
        "kind": "load-times",
        "model": chosen.name,
        "weights": chosen.weights,
        "layers": chosen.target.num_layers,
        "tensor_parallel": options.tensor_parallel,
    }
    environment = rows.environment(options.commit)
    done = [rows.rounded(common | one | environment) for one in measured]
    for row in done:
        rows.append(options.out, row)
    return done


def _measured(folder: Path, options: Options, *, is_cold: bool) -> dict:
    """A plain read and a load, both from the disk, or both from the page cache."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # The pages of a file that several threads read first are smaller and slower to read again (measured: a half).
    evict(folder)
    plain = _plain_read(files)
    if is_cold:
        evict(folder)
    else:
        plain = _plain_read(files)
    arguments = [str(folder), str(options.tensor_parallel), *(["verify"] if options.verify else [])]
    loaded = json.loads(_child("-m", "bench.load_times", *arguments).splitlines()[-1])
    nbytes = sum(path.stat().st_size for path in files)
    return {
        "cache": "cold" if is_cold else "warm",
        "bytes": nbytes,
        "plain_read_seconds": plain,
        "plain_gigabytes_per_second": nbytes / 1e9 / plain,
        **loaded,
        "gigabytes_per_second": nbytes / 1e9 / loaded["seconds"],
        "ratio_to_plain": plain / loaded["seconds"],
    }


def _plain_read(files: list[Path]) -> float:
    """Seconds of one thread that reads into the same few megabytes."""
    buffer, start = bytearray(_READ_BYTES), time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _child(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"{' '.join(arguments)}: {lines[-1]}")
    return done.stdout


def _anonymous() -> int:
    """Anonymous bytes of this process, as the kernel counts them."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def loaded(folder: str, tensor_parallel: int, verify: bool) -> dict:
    """Loads the target; runs in the child process.

    Args:
      verify: compare every bit with parameters that are joined from mapped files, outside of the measured time.

    Returns:
      `seconds` from files until the device has all weights in the order that its kernels read, `order_seconds` of
      them for that order, the most anonymous bytes before that, and those at the start.
    """
    import jax
    import jax.numpy as jnp

    from peagle_jax.checkpoint import load_target
    from peagle_jax.devices import Devices
    from peagle_jax.models.weight_order import order_weights

    jax.block_until_ready(jnp.zeros(8) + 1)
    devices = Devices(tensor_parallel)
    before, peak, stopped = _anonymous(), [0], threading.Event()

    def sample() -> None:
        while not stopped.wait(_SAMPLE_SECONDS):
            peak[0] = max(peak[0], _anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        start = time.perf_counter()
        target = load_target(folder, dtype="bfloat16", devices=devices)
        jax.block_until_ready(jax.tree.leaves(target))
        read = time.perf_counter() - start
    finally:
        stopped.set()
        sampler.join()
    highest = max(peak[0], _anonymous())
    if verify:
        _verify(target, Path(folder))
    start = time.perf_counter()
    order_weights(target, "bf16")
    jax.block_until_ready(jax.tree.leaves(target))
    order = time.perf_counter() - start
    return {
        "seconds": read + order,
        "order_seconds": order,
        "verified": verify,
        "anonymous_bytes_before": before,
        "peak_anonymous_bytes": highest,
    }


def _verify(target, folder: Path) -> None:
    """Raises `ConfigError` if a parameter is not, bit by bit, what its tensors are."""
    import numpy as np
    from flax import nnx

    from peagle_jax.checkpoint.assembly import stored_dtype
    from peagle_jax.checkpoint.checked import checked_target
    from peagle_jax.checkpoint.converted import joined, open_checkpoint

    checkpoint = open_checkpoint(folder)
    _, layout = checked_target(folder, checkpoint)
    params = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(target))}
    for rule in layout.rules:
        stored = joined(checkpoint, rule)
        wanted = stored.astype(stored_dtype(stored.dtype, rule.path[-1], "bfloat16"), copy=False)
        found = np.asarray(params[rule.path])
        as_bytes = lambda array: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not np.array_equal(as_bytes(found), as_bytes(wanted)):
            raise ConfigError(f"{'.'.join(map(str, rule.path))} is not what the file holds")


if __name__ == "__main__":
    print(json.dumps(loaded(sys.argv[1], int(sys.argv[2]), "verify" in sys.argv[3:])))
