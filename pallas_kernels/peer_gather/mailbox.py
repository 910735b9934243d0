"""Memory that the GPUs of one process write for each other, and the table with which a GPU finds
it.

Each GPU has a mailbox, int32 [2, n, BLOCKS, UNITS, 4]: slot, sender, thread block, unit, words. All
words are EMPTY before the first message. A sender stores units of four words, none of which is
EMPTY. The receiver reads a unit again and again until no word of it is EMPTY, and then stores EMPTY
in its place. A word arrives whole, so no fence and no flag is needed. This is the "Lamport"
protocol of TensorRT-LLM's all-reduce.

**What a unit holds.** Four words of floats: a NaN with the bits of EMPTY becomes another NaN,
nothing else changes. Or two words of any bits, each as two halves of 16 bits.

**Messages are counted for each thread block.** Thread block b of a message writes only the units of
b, on all GPUs alike, and adds one to its number. All GPUs run the same messages in the same order,
so they agree on it.

**Two slots are enough.** Message m uses slot m mod 2, the slot of message m - 2. A GPU that sends m
has received m - 1 from each peer. A peer sent it in the kernel of m - 1, which began after the
peer's kernel of m - 2 had ended. So the peer has read message m - 2 and emptied its units.

A table is int32 [LINKS]: the GPU's rank, a zero, the addresses of all mailboxes by rank (64 bits
each, low word first), and from `COUNTERS` on the number of the last message of each thread block.
"""

import numpy as np

BLOCKS = 128
"""Most thread blocks of a message. All of them run at once on a GPU with as many
multiprocessors."""
THREADS = 128
EMPTY = -1
OTHER_NAN = 0x7FFFFFFF
"""Word in place of EMPTY: a float32 NaN, or two of bfloat16."""
UNIT_BYTES = 16
"""Data in a unit of floats."""
HALVES_BYTES = 8
"""Data in a unit of halves."""
MOST_BYTES = 2 << 20
"""Largest message of floats."""
UNITS = MOST_BYTES // UNIT_BYTES // BLOCKS
"""Most units of a thread block."""
MOST_DEVICES = 31
ADDRESSES = 2
COUNTERS = 64
LINKS = COUNTERS + BLOCKS
"""Words of a table."""


def empty(num_devices: int) -> np.ndarray:
    """A GPU's mailbox before the first message."""
    return np.full((2, num_devices, BLOCKS, UNITS, 4), EMPTY, np.int32)


def table(rank: int, addresses: list[int]) -> np.ndarray:
    """int32 [LINKS], the table of GPU `rank`.

    Args:
      addresses: of all mailboxes, by rank.
    """
    words = np.zeros(LINKS, np.int32)
    words[0] = rank
    words[ADDRESSES : ADDRESSES + 2 * len(addresses)] = np.array(addresses, np.int64).view(np.int32)
    return words


def blocks_of(num_units: int) -> tuple[int, int]:
    """Thread blocks of a message, and units of each; the last has fewer."""
    blocks = min(BLOCKS, -(-num_units // THREADS))
    each = -(-num_units // blocks)
    return -(-num_units // each), each
