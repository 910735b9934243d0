"""Runs lane code of kernels on a CPU: numpy arrays of 32 lanes in place of MLIR's values
(`moe.mosaic_lanes`).

A warp is one Python thread, and one warp runs at a time, up to its next barrier; so a missing
barrier shows as a wrong result in one of the two orders of warps. Lanes run in step, so a missing
`sync_warp` would not show: a lane may load what another lane of its warp has stored only after a
barrier. Arrays of a warpgroup are whole in each warp, but what an inline function returns has only
the elements of its own warp; the others are `POISON`.
"""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send
from pallas_kernels.moe import mosaic_lanes

POISON = np.int32(-0x21524111)
"""What memory and foreign elements hold; an odd number of neither id nor slot, as a float32 -6e18.
"""


def as_words(array) -> np.ndarray:
    return np.asarray(array).view(np.int32)


def places(layout, shape: tuple[int, int], warp: int) -> np.ndarray:
    """Indices [elements, 32] of a flattened array that a warp's lanes have, by register."""
    layout = layout.to_mgpu()
    index = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept, cut = index.shape[: index.ndim - len(tile)], index.shape[index.ndim - len(tile) :]
        pairs = [n for whole, part in zip(cut, tile, strict=True) for n in (whole // part, part)]
        index = index.reshape(*kept, *pairs)
        first = len(kept)
        order = [*range(first), *range(first, index.ndim, 2), *range(first + 1, index.ndim, 2)]
        index = index.transpose(order)
    dims = [*layout.warp_dims, *layout.lane_dims]
    moved = np.moveaxis(index, dims, range(len(dims)))
    warps = len(layout.warp_dims)
    moved = moved.reshape(4, 32, -1, order="C") if warps else moved
    return moved[warp].T


class Ref:
    """An array in a memory of words.

    Attributes:
      words: a view of the memory, int32.
      dtype: what it holds.
    """

    def __init__(self, memory: np.ndarray, words: np.ndarray, dtype):
        self.memory, self.words, self.dtype = memory, words, np.dtype(dtype)
        self.shape = words.shape

    @property
    def address(self) -> int:
        start = lambda array: array.__array_interface__["data"][0]
        return start(self.words) - start(self.memory)

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        whole = index if isinstance(index, tuple) else (index,)
        return Ref(self.memory, self.words[tuple(map(as_slice, whole))], self.dtype)

    def __setitem__(self, index, value):
        assert index is Ellipsis
        self.words[...] = as_words(value)

    def read(self):
        """A copy, as loads make it."""
        return jnp.asarray(self.words.copy().view(self.dtype))


def as_slice(part):
    if isinstance(part, slice):
        return part
    return slice(int(part.start), int(part.start) + part.size)


class Memory:
    """Words from which arrays are taken one after the other, each aligned to 16 bytes."""

    def __init__(self, size: int = 1 << 18):
        self.words, self.used = np.full(size, POISON), 0

    def take(self, shape, dtype=np.int32) -> Ref:
        start, count = self.used, int(np.prod(shape))
        self.used += -(-count // 4) * 4
        assert self.used <= self.words.size
        return Ref(self.words, self.words[start : start + count].reshape(shape), dtype)


class Machine:
    """Blocks of one warpgroup that run a function each.

    Attributes:
      shared: the memory of each block.
      device: device memory.
      expected, received: bytes that a block waits for, and that were sent to it.
      backwards: the last warp runs first.
    """

    def __init__(self, monkeypatch, *, blocks: int = 1, backwards: bool = False):
        self.shared = [Memory() for _ in range(blocks)]
        self.device, self.backwards = Memory(), backwards
        self.own = threading.local()
        fakes = {name: getattr(self, name) for name in _OPERATIONS} | _arithmetic()
        for name, fake in fakes.items():
            monkeypatch.setattr(mosaic_lanes, name, fake)
        monkeypatch.setattr(plgpu, "inline_mgpu", self.inline_mgpu)
        self.expected, self.received = {}, dict.fromkeys(range(blocks), 0)
        self.armed: set = set()  # warps that have armed, and warps that know that all blocks have
        # (block, warp) -> the lane that stored each word since the last barrier, or -1
        self.writers: dict = {}
        of_messages = {
            name: getattr(self, name) for name in ("arm", "wait_armed", "send", "receive")
        }
        for name, fake in of_messages.items():
            monkeypatch.setattr(cluster_send, name, fake)
        monkeypatch.setattr(plgpu, "load", lambda ref, **_: ref.read())
        iota = lambda dtype, shape, axis, **_: lax.broadcasted_iota(dtype, shape, axis)
        monkeypatch.setattr(plgpu, "broadcasted_iota", iota)

    def run(self, program) -> None:
        """Calls program(block) in each warp of each block."""
        warps = [(block, warp) for block in range(len(self.shared)) for warp in range(4)]
        warps = warps[::-1] if self.backwards else warps
        self.main, self.turns = threading.Semaphore(0), {w: threading.Semaphore(0) for w in warps}
        self.waits: dict = dict.fromkeys(warps)  # the barrier where a warp waits
        self.errors: list[BaseException] = []

        def run(block, warp):
            self.own.place = block, warp
            self.turns[block, warp].acquire()
            try:
                program(block)
            except BaseException as error:  # it is raised in the main thread
                self.errors.append(error)
            self.waits[block, warp] = "ended"
            self.main.release()

        for one in warps:
            threading.Thread(target=run, args=one, daemon=True).start()
        while set(self.waits.values()) != {"ended"}:
            for one in warps:
                if self.waits[one] is None:
                    self.turns[one].release()
                    self.main.acquire()
                    if self.errors:
                        raise self.errors[0]
            self._open_barriers()

    def _open_barriers(self) -> None:
        groups = [[(block, warp) for warp in range(4)] for block in range(len(self.shared))]
        found = [{self.waits[one] for one in group} for group in groups]
        opened = [
            one
            for group, at in zip(groups, found, strict=True)
            if at == {"warpgroup"}
            for one in group
        ]
        if set().union(*found) == {"cluster"}:
            opened = list(self.waits)
        assert opened or set().union(*found) == {"ended"}, f"warps wait forever: {self.waits}"
        self.waits.update(dict.fromkeys(opened))

    def _wait(self, barrier: str) -> None:
        self.waits[self.own.place] = barrier
        self.main.release()
        self.turns[self.own.place].acquire()

    def inline_mgpu(self, arg_types=(), return_type=None):
        def decorate(function):
            def call(*args):
                held = [
                    SimpleNamespace(array=arg, layout=type_) if _has_elements(arg) else arg
                    for arg, type_ in zip(args, arg_types, strict=True)
                ]
                made = function(None, *held)
                assert (made is None) == (return_type is None)
                return made

            return call

        return decorate

    # The operations of `mosaic_lanes` that are not arithmetic.

    def thread(self):
        return np.arange(32, dtype=np.int32) + 32 * self.own.place[1]

    def address(self, ref):
        return ref.address

    global_address = address

    def scalar(self, x):
        return int(x)

    def elements(self, held):
        index = places(held.layout, held.array.shape, self.own.place[1])
        return list(as_words(held.array).reshape(-1)[index])

    def array(self, found, shape, dtype, layout):
        whole = np.full(np.prod(shape), POISON)
        index = places(layout, shape, self.own.place[1])
        for at, x in zip(index, found, strict=True):
            whole[at] = x
        return jnp.asarray(whole.reshape(shape).view(dtype))

    def largest(self, x):
        return np.full(32, x.max())

    def lanes_where(self, condition):
        return np.full(32, _wrapped(int(sum(1 << lane for lane in np.flatnonzero(condition)))))

    def of_lane(self, x, lane):
        lane = np.broadcast_to(lane, 32)
        assert ((lane >= 0) & (lane < 32)).all()
        return x[lane]

    def add_lane_below(self, x, distance):
        below = np.concatenate([np.zeros(distance, np.int32), x[:-distance]])
        return x + below

    def sync_warp(self):
        self.writers.pop(self.own.place, None)

    def sync_warpgroup(self):
        self.sync_warp()
        self._wait("warpgroup")

    def arm(self, barriers, counts):
        assert ("arms", self.own.place) not in self.armed
        self.armed.add(("arms", self.own.place))
        self.expected[self.own.place[0]] = counts[0]

    def wait_armed(self):
        assert ("arms", self.own.place) in self.armed
        self._wait("cluster")
        self.armed.add(("all", self.own.place))

    def receive(self, barriers, number):
        """Waits until all warps of all blocks have come so far, which have sent what is awaited."""
        self._wait("cluster")
        block = self.own.place[0]
        assert self.received[block] == self.expected[block]

    def _place(self, memory, place, wide=1):
        place = np.broadcast_to(place, 32)
        assert (place % (4 * wide) == 0).all()
        assert ((place >= 0) & (place < 4 * memory.used)).all()
        return place // 4

    def load(self, place, count=1):
        memory = self.shared[self.own.place[0]]
        wide = next(n for n in (4, 2, 1) if count % n == 0)
        at = self._place(memory, place, wide)
        if (writers := self.writers.get(self.own.place)) is not None:
            for i in range(count):
                found = writers[at + i]
                assert ((found < 0) | (found == np.arange(32))).all(), "no barrier since the store"
        return [memory.words[at + i] for i in range(count)]

    def _put(self, memory, place, x, where):
        where = np.broadcast_to(True if where is None else where, 32)
        at = self._place(memory, np.where(where, place, 0))[where]
        x = np.broadcast_to(np.asarray(x, np.int32), 32)[where]
        memory.words[at] = x
        assert (memory.words[at] == x).all(), "lanes store different words to one place"

    def store(self, place, x, where=None):
        memory = self.shared[self.own.place[0]]
        self._put(memory, place, x, where)
        none = np.full(memory.words.size, -1, np.int8)
        writers = self.writers.setdefault(self.own.place, none)
        where = np.broadcast_to(True if where is None else where, 32)
        at = self._place(memory, np.where(where, place, 0))
        writers[at[where]] = np.arange(32)[where]

    def store_words(self, place, found):
        wide = next(n for n in (4, 2, 1) if len(found) % n == 0)
        self._place(self.shared[self.own.place[0]], place, wide)
        for i, x in enumerate(found):
            self.store(place + 4 * i, x)

    def send(self, place, counted_at, block, words, where=None):
        (x,) = words
        assert counted_at % 8 == 0
        assert ("all", self.own.place) in self.armed
        self.received[block] += 4 * int(np.broadcast_to(where, 32).sum())
        self._put(self.shared[block], place, x, where)

    def store_global(self, place, offset, x, where=None):
        self._put(self.device, place + offset, x, where)

    def or_shared(self, place, x, where=None):
        memory = self.shared[self.own.place[0]]
        where = np.broadcast_to(True if where is None else where, 32)
        at = self._place(memory, np.where(where, place, 0))[where]
        np.bitwise_or.at(memory.words, at, np.broadcast_to(x, 32)[where])

    def loop(self, count, body, carry):
        for i in range(count):
            carry = body(i, carry)
        return carry


_OPERATIONS = (
    "thread",
    "address",
    "global_address",
    "scalar",
    "elements",
    "array",
    "largest",
    "lanes_where",
    "of_lane",
    "add_lane_below",
    "sync_warp",
    "sync_warpgroup",
    "load",
    "store",
    "store_words",
    "store_global",
    "or_shared",
    "loop",
)


def _has_elements(arg) -> bool:
    return not isinstance(arg, Ref) and np.ndim(arg) > 0


def _wrapped(x):
    """A whole number as a word: its lowest 32 bits."""
    if np.ndim(x):
        return np.asarray(x).astype(np.int64).astype(np.uint32).astype(np.int32)
    return np.int32((int(x) + 2**31) % 2**32 - 2**31)


def _arithmetic() -> dict:
    """Operations on words and conditions; words are computed in 64 bits and cut."""
    wide = lambda x: x if np.asarray(x).dtype == bool else np.asarray(x, np.int64)

    def in_words(function):
        return lambda x, y: _wrapped(function(wide(x), wide(y)))

    def bitwise(function):
        def run(x, y):
            found = function(wide(x), wide(y))
            return found if found.dtype == bool else _wrapped(found)

        return run

    return dict(
        word=lambda x: x,
        plus=in_words(lambda x, y: x + y),
        minus=in_words(lambda x, y: x - y),
        times=in_words(lambda x, y: x * y),
        divided=in_words(lambda x, y: x // y),
        left=in_words(lambda x, y: x << y),
        right=in_words(lambda x, y: x >> y),
        larger=in_words(np.maximum),
        smaller=in_words(np.minimum),
        bit_and=bitwise(lambda x, y: x & y),
        bit_or=bitwise(lambda x, y: x | y),
        bit_xor=bitwise(lambda x, y: x ^ y),
        equal=lambda x, y: wide(x) == wide(y),
        less=lambda x, y: wide(x) < wide(y),
        select=lambda condition, x, y: _wrapped(np.where(condition, wide(x), wide(y))),
        popcount=lambda x: np.bitwise_count(np.asarray(x, np.int32).view(np.uint32)).astype(
            np.int32
        ),
    )
