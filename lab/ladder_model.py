"""Predicted time of a step of the ladder: the larger of three times, plus what does not overlap.

- memory: all bytes once, at the bandwidth of device memory.
- level 2: the weight once, x once for each tile of weight rows, and partial sums twice, at the
  bandwidth of the level 2 cache.
- latency: the steps of the busiest multiprocessor one after the other. A step of one block takes
  what a tile needs to arrive, divided by the slots of the ring, or what its warpgroups need to
  multiply it, if that is longer.

Launching a kernel and waiting for its first tile do not overlap with anything. lab/ladder.md
compares the predictions with measurements. They are for an H200.
"""

from dataclasses import dataclass

from lab.lesson.specs import TOKENS, Spec
from lab.roofline import CHIPS
from pallas_kernels.device import H200

LAUNCH = 2.3e-6
"""Seconds of an empty kernel in a CUDA graph (measured, lab/log.md)."""

ARRIVAL = 1.0e-6
"""Seconds from asking for a tile to its arrival, while the memory is busy (assumed)."""

LEVEL_2 = 5.5e12
"""Bytes per second from the level 2 cache (measured: 5.2 to 6.3)."""

MULTIPLY = {"bf16": 0.15e-6, "fp8": 0.3e-6}
"""Seconds that a block takes for a tile that is there, with few rows: barriers and wgmma; with FP8
also some 280 instructions a thread that unpack (counted in the machine code)."""

_BANDWIDTH = CHIPS[H200.name].bandwidth


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a call; `limit` is the time that decides: "memory", "level 2" or "latency"."""

    seconds: float
    floor: float
    limit: str


def predict(spec: Spec) -> Prediction:
    """The time of a spec on an H200, and the floor: its bytes at the bandwidth of the memory."""
    floor = spec.bytes / _BANDWIDTH
    steps, slots, chunks = _steps(spec)
    form = "bf16" if spec.step < "5" else "fp8"
    # Without a ring a tile is asked for when the one before it has been multiplied.
    step = ARRIVAL + MULTIPLY[form] if slots == 0 else max(ARRIVAL / slots, MULTIPLY[form])
    times = {
        "memory": floor,
        "level 2": _level_2_bytes(spec, chunks) / LEVEL_2,
        "latency": steps * step,
    }
    limit = max(times, key=times.get)
    kernels = 1 + (chunks > 1)  # the second one adds the chunks
    seconds = kernels * LAUNCH + ARRIVAL + times[limit]
    return Prediction(seconds=seconds, floor=floor, limit=limit)


def _steps(spec: Spec) -> tuple[int, int, int]:
    """(steps in a row on the busiest multiprocessor, slots of the ring, chunks of K).

    Up to step 3 all blocks run at once, several on a multiprocessor, and each has its own steps in
    a row.
    """
    from lab.lesson import mosaic_2_ring, mosaic_3_roles, mosaic_4_persistent

    N, K = spec.outputs, spec.inputs
    columns = 64 if spec.step < "5" else 128
    match spec.step:
        case "1_wgmma":
            return K // columns, 0, 1
        case "2_ring":
            return K // columns, mosaic_2_ring.STAGES, 1
        case "3_roles":
            return K // columns, mosaic_3_roles.STAGES, 1
    tiles, sms = N // mosaic_4_persistent.TILE, H200.num_sms
    chunks = 1 if spec.touched else mosaic_4_persistent.chunks(N, K, sms, columns)
    units = tiles * chunks * max(1, spec.touched)
    steps = -(-units // sms) * -(-K // columns // chunks)
    return steps, mosaic_4_persistent.STAGES, chunks


def _level_2_bytes(spec: Spec, chunks: int) -> float:
    tile = 64 if spec.step < "3" else 128
    rows = TOKENS * spec.touched if spec.touched else spec.rows
    parts = 2 * 4 * chunks * rows * spec.outputs if chunks > 1 else 0
    return spec.bytes + (spec.outputs / tile - 1) * 2 * rows * spec.inputs + parts
