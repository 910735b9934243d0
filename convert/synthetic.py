"""Checkpoints with a real model's tensor names, shapes, dtypes and files, and random bytes for weights.

They serve to measure and test the converter, not as models. All values are finite, all scales positive.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

import ml_dtypes
import numpy as np

from convert.numbers import BLOCK, GROUP
from peagle_jax.checkpoint.converted import DTYPE_NAMES
from peagle_jax.checkpoint.layout import FP8, PACKED
from peagle_jax.checkpoint.safetensors import INDEX, CheckpointError
from peagle_jax.checkpoint.tables import target_tensors
from peagle_jax.checkpoint.target_writer import target_json
from peagle_jax.config import TargetConfig

Quantization = Literal["none", "fp8", "mxfp4"]
BF16 = np.dtype(ml_dtypes.bfloat16)
SHARD_BYTES = 5_000_000_000
_POOL_BYTES = 16_000_000
_PACKED = GROUP // 2
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_CONFIGS = {
    "none": {},
    "fp8": {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    },
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
}

Shapes = Iterator[tuple[str, np.dtype, tuple[int, ...]]]
Pools = dict[bool, memoryview]


def with_layers(config: TargetConfig, num_layers: int) -> TargetConfig:
    """The model cut to its first layers."""
    windows, experts = config.sliding_windows, config.experts
    if experts is not None:
        dense = tuple(i for i in experts.dense_layers if i < num_layers)
        experts = replace(
            experts, dense_layers=dense, dense_size=experts.dense_size if dense else None
        )
    windows = windows and windows[:num_layers]
    return replace(config, num_layers=num_layers, sliding_windows=windows, experts=experts)


def tensors(config: TargetConfig, quantization: Quantization) -> Shapes:
    """(name, dtype, shape) of every tensor of a released checkpoint.

    Raises:
      CheckpointError: no released checkpoint has this family and quantisation.
    """
    if quantization == "mxfp4" and config.family != "gpt_oss":
        raise CheckpointError(f"mxfp4 is a form of gpt_oss, not of {config.family}")
    if quantization == "fp8" and config.family == "gpt_oss":
        raise CheckpointError("gpt_oss has no fp8 form here; mxfp4 and none it has")
    for name, info in target_tensors(config, BF16).items():
        if quantization == "mxfp4" and name.endswith(_EXPERTS):
            E, inputs, outputs = info.shape
            yield f"{name}_blocks", PACKED, (E, outputs, inputs // GROUP, _PACKED)
            yield f"{name}_scales", PACKED, (E, outputs, inputs // GROUP)
        elif quantization == "fp8" and ".layers." in name and name.endswith("_proj.weight"):
            yield name, FP8, info.shape
            yield f"{name}_scale_inv", BF16, tuple(-(-n // BLOCK) for n in info.shape)
        else:
            yield name, info.dtype, info.shape


def write_synthetic(
    folder: Path,
    config: TargetConfig,
    *,
    quantization: Quantization = "none",
    shard_bytes: int = SHARD_BYTES,
    sparse: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Writes config.json, shards of at most `shard_bytes` (or one tensor) and their index.

    Args:
      sparse: write holes (zeros without disk space) instead of random bytes, except for FP8 scales.
    Returns the bytes of all tensors.

    Raises:
      CheckpointError: the folder exists, or as `tensors`.
    """
    shards: list[list] = []
    room = 0
    for entry in tensors(config, quantization):
        size = _nbytes(entry)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= size
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(f"{folder}: exists; give a new folder") from error
    raw = target_json(config, "bfloat16") | _CONFIGS[quantization]
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    pools = _pools(seed)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, pools, sparse, progress)
        weight_map |= {entry[0]: name for entry in shard}
    total = sum(_nbytes(entry) for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _nbytes(entry) -> int:
    _, dtype, shape = entry
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _pools(seed: int) -> Pools:
    """Pools of random bytes from which tensors are cut, for weights (False) and for scales (True).

    The top exponent bit is 0, so that any two bytes are a finite bfloat16, and any byte is a finite FP8
    value or a valid MXFP4 scale. Scales are positive.
    """
    random = np.frombuffer(np.random.default_rng(seed).bytes(2 * _POOL_BYTES), np.uint8)
    return {False: memoryview(random & 0b1011_1111), True: memoryview(random & 0b0011_1111 | 1)}


def _write_shard(path: Path, shard: list, pools: Pools, sparse: bool, progress) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for entry in shard:
        name, dtype, shape = entry
        end = offset + _nbytes(entry)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + offset)
        at = 0
        for entry in shard:
            name, size = entry[0], _nbytes(entry)
            is_fp8_scale = name.endswith("_scale_inv")  # a scale must not be zero
            if not sparse or is_fp8_scale:
                file.seek(begin + at)
                _write_numbers(file, pools[is_fp8_scale or name.endswith("_scales")], size, at)
            at += size
            progress(size)


def _write_numbers(file: BinaryIO, pool: memoryview, size: int, at: int) -> None:
    """Writes `size` bytes of the pool; the start in the pool depends on the position `at` in the shard."""
    while size:
        count = min(_POOL_BYTES, size)
        shift = at // 14 % (_POOL_BYTES // 2) * 2  # even, to keep two-byte values aligned
        file.write(pool[shift : shift + count])
        at, size = at + count, size - count
