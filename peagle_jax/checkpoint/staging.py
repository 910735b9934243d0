"""Host memory in which arrays lie until a device has its copy.

An accelerator's copy leaves the memory free for the next arrays: memory that was used before has
its pages, and fresh memory costs a fault and zeros for each. A CPU device takes the memory itself,
so there each array has its own.
"""

import mmap
from collections.abc import Sequence

import numpy as np

_ALIGNMENT = 64  # bytes; a CPU device takes memory that begins at a multiple of it without a copy
_UNIT = 16 << 20
_MAPPED_BYTES = 4 << 20  # from which on numpy asks for huge pages


def aligned(size: int) -> np.ndarray:
    """Fresh memory, uint8 [size].

    Large memory is mapped here, because numpy asks for huge pages. A virtual machine that gets its
    memory from its host on first use was several times slower with them (bfloat16 on a CPU: 0.4 to
    1.2 instead of 1.1 to 4.4 GB/s).
    """
    if size >= _MAPPED_BYTES:
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


class Staging:
    """Memory for groups of arrays.

    Args:
      is_reused: whether `give_back` keeps memory for later groups.
      most: bytes of memory that is in use and kept, together; a larger group is taken all the same.
    """

    def __init__(self, *, is_reused: bool, most: int):
        self._is_reused, self._most = is_reused, most
        self._kept: list[np.ndarray] = []
        self._used = 0

    def take(self, sizes: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Memory of each size, uint8 [size], and the block to give back once no device reads it."""
        if not self._is_reused:
            return [aligned(size) for size in sizes], None
        padded = [size + -size % _ALIGNMENT for size in sizes]
        block, start, out = self._block(sum(padded)), 0, []
        for size, step in zip(sizes, padded, strict=True):
            out.append(block[start : start + size])
            start += step
        return out, block

    def _block(self, size: int) -> np.ndarray:
        fitting = [block for block in self._kept if block.nbytes >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._kept = [one for one in self._kept if one is not block]
        else:
            size += -size % _UNIT
            while self._kept and self._used + self.kept_bytes + size > self._most:
                self._kept.pop(0)
            block = aligned(size)
        self._used += block.nbytes
        return block

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that waits to be used again."""
        return sum(block.nbytes for block in self._kept)

    def give_back(self, block: np.ndarray | None) -> None:
        if block is not None:
            self._used -= block.nbytes
            self._kept.append(block)
