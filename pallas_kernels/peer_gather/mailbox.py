"""Memory that the GPUs of one process write for each other, and the table with which a GPU finds it.

Each GPU has a mailbox, int32 [2, n, BLOCKS, PAIRS, 4]: slot, sender, thread block, pair, words. A sender stores
two words of data and the number of the message behind each of them, 16 bytes in one instruction:

    word 0 of the data   number   word 1 of the data   number

The receiver reads a pair again and again until both numbers are those of the message it waits for. The data
has arrived then, because a GPU writes 8 aligned bytes at once: no fence and no second flag is needed. This is the
"LL" protocol of NCCL.

**Messages are numbered for each thread block.** Thread block b of a message writes only the pairs of b, on all
GPUs alike, and adds one to its number. All GPUs run the same messages in the same order, so they agree on it.

**Two slots are enough.** Message m uses slot m mod 2, so it overwrites message m - 2. A GPU that sends m has
received m - 1 from each peer. A peer sent it in the kernel of m - 1, which began after the peer's kernel of m - 2 had
ended. So the peer has read message m - 2.

A table is int32 [LINKS]: the GPU's rank, a zero, the addresses of all mailboxes by rank (64 bits each, low word
first), and from `COUNTERS` on the number of the last message of each thread block.
"""

import numpy as np

BLOCKS = 128
"""Most thread blocks of a message. All of them run at once on a GPU with as many multiprocessors."""
THREADS = 128
MOST_BYTES = 2 << 20
"""Largest message."""
PAIR_BYTES = 8
"""Data in a pair."""
PAIRS = MOST_BYTES // PAIR_BYTES // BLOCKS
"""Pairs of a thread block."""
MOST_DEVICES = 31
ADDRESSES = 2
COUNTERS = 64
LINKS = COUNTERS + BLOCKS
"""Words of a table."""


def mailbox_shape(num_devices: int) -> tuple[int, ...]:
    """Shape of a GPU's mailbox, int32; all zeros before the first message."""
    return 2, num_devices, BLOCKS, PAIRS, 4


def table(rank: int, addresses: list[int]) -> np.ndarray:
    """int32 [LINKS], the table of GPU `rank`.

    Args:
      addresses: of all mailboxes, by rank.
    """
    words = np.zeros(LINKS, np.int32)
    words[0] = rank
    words[ADDRESSES : ADDRESSES + 2 * len(addresses)] = np.array(addresses, np.int64).view(np.int32)
    return words


def number_after(number: int) -> int:
    """The number of the next message, 32 bits: 0 is skipped, which an empty mailbox has. Odd and even ones alternate."""
    return (number + 1) % 2**32 or 2


def blocks_of(num_pairs: int) -> tuple[int, int]:
    """Thread blocks of a message, and pairs of each; the last has fewer."""
    blocks = min(BLOCKS, -(-num_pairs // THREADS))
    each = -(-num_pairs // blocks)
    return -(-num_pairs // each), each
