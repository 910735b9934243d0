"""Independent decoder of safetensors tensors, as bits and as numbers, for `verify`.

`decode` and `expected` share no code with the converter and the loader, so that one bug cannot affect
both sides of the comparison.
"""

import json
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.safetensors import CheckpointError

BLOCK, GROUP = 128, 32
"""Block sizes: rows and columns per FP8 scale; columns per MXFP4 scale."""
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element, by the dtype's name in the header."""

Seen = Callable[[str, np.ndarray], None]


class SourceTensors:
    """`dtypes` and `shapes` by name, and `rows`: bits as unsigned integers of the dtype's size.

    `seen(name, data)` receives the bytes of each tensor once, in order, as uint8 [n], on the first read.
    """

    def __init__(self, folder: Path, seen: Seen = lambda name, data: None):
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self._seen, self._position = seen, {}
        for path in _files(folder):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self.dtypes[name] = entry["dtype"]
                self.shapes[name] = tuple(entry["shape"])
                self._places[name] = path, 8 + size + entry["data_offsets"][0]

    def __contains__(self, name: str) -> bool:
        return name in self.dtypes

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` of the tensor's first axis, [stop - start, ...].

        Raises:
          CheckpointError: the file ends before.
        """
        shape, size = self.shapes[name], _SIZES[self.dtypes[name]]
        row_bytes = size * prod(shape[1:])
        path, offset = self._places[name]
        begin, count = start * row_bytes, (stop - start) * row_bytes
        with path.open("rb") as file:
            data = np.fromfile(file, np.uint8, count, offset=offset + begin)
        if data.nbytes < count:
            raise CheckpointError(f"{path}: ends inside tensor {name!r}")
        if begin == self._position.get(name, 0):
            self._seen(name, data)
            self._position[name] = begin + count
        return data.view(f"u{size}").reshape(stop - start, *shape[1:])

    def whole(self, name: str) -> np.ndarray:
        """The tensor in its own shape."""
        shape = self.shapes[name]
        return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    one = folder / "model.safetensors"
    return [one] if one.is_file() else list(folder.glob("*.safetensors"))


def numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of the bits of BF16, F16, F32, F64 or F8_E4M3, in their shape."""
    if dtype == "F8_E4M3":
        return _fp8_e4m3()[bits]
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).astype(
        np.float32
    )


@cache
def _fp8_e4m3() -> np.ndarray:
    """All 256 values: sign, 4 exponent bits with bias 7, 3 mantissa bits; S.1111.111 is NaN."""
    table = []
    for code in range(256):
        sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        if (exponent, mantissa) == (15, 7):
            table.append(float("nan"))
        elif exponent:
            table.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        else:
            table.append(sign * mantissa / 8 * 2.0**-6)
    return np.array(table, np.float32)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""


def mxfp4_numbers(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [..., k] of bytes [..., k / 2] (two codes each, low nibble first) and scales [..., k / 32]
    (exponents of 2 with bias 127)."""
    codes = np.array([*_FP4, *(-x for x in _FP4)], np.float32)
    pairs = np.stack([codes[packed % 16], codes[packed // 16]], axis=-1)
    powers = np.exp2(scales.astype(np.float64) - 127).astype(np.float32)
    return pairs.reshape(*packed.shape[:-1], -1) * np.repeat(powers, GROUP, axis=-1)


def fp8_scale_grid(
    bits: np.ndarray, dtype: str, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each row and each 128 columns of an FP8 matrix: as bits, and as float32.

    Args:
      bits: one scale for the tensor ([], [1] or [1, 1]), each row ([n] or [n, 1]), each row and 128
        columns [n, k / 128], or each 128 rows and columns [n / 128, k / 128]; quotients rounded up.
    Returns two arrays [rows, columns / 128].
    """
    across = -(-columns // BLOCK)
    grid = bits.reshape(len(bits) if bits.ndim else 1, -1)
    if bits.size == 1:
        picked = np.zeros(rows, int)
    elif len(grid) == rows:
        picked = np.arange(rows)
    else:
        picked = np.arange(rows) // BLOCK
    spread = np.broadcast_to(grid[picked], (rows, across))
    return spread, numbers(np.ascontiguousarray(spread), dtype)
