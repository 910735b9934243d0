"""Messages between GPUs: their protocol on simulated ones, tables, and the definition by XLA's
all-gather.

The kernel itself needs GPUs; `test_compile.py` compiles it.
"""

import contextlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.moe.api import Mixture
from pallas_kernels.peer_gather import api, mailbox


class Simulation:
    """GPUs that send messages in the order of `sizes`. Anything that may happen next happens, at
    random: a thread stores a unit, a word of a stored unit arrives, a thread reads a unit that it
    waits for and empties it.

    Args:
      sizes: units of each message.
      slots: of a mailbox.
    """

    def __init__(self, num_devices: int, sizes: list[int], slots: int, seed: int):
        self._random, self._n, self._slots = random.Random(seed), num_devices, slots
        self._sizes = sizes
        self._boxes = [{} for _ in range(num_devices)]  # (slot, sender, block, unit, word): content
        self._numbers = [{} for _ in range(num_devices)]  # of the last message, by thread block
        self._flying: list[tuple] = []
        self._message = [-1] * num_devices
        self._to_send = [[] for _ in range(num_devices)]
        self._to_receive = [[] for _ in range(num_devices)]
        self.received: list[dict] = [{} for _ in range(num_devices)]

    def run(self, most_actions: int = 200_000) -> None:
        for device in range(self._n):
            self._next_message(device)
        for _ in range(most_actions):
            actions = []
            for device in range(self._n):
                if self._to_send[device]:
                    actions.append((self._send, device))
                if self._to_receive[device]:
                    actions.append((self._poll, device))
            if self._flying:
                actions.append((self._arrive,))
            if not actions:
                return
            act, *args = self._random.choice(actions)
            act(*args)
        raise TimeoutError

    def _next_message(self, device: int) -> None:
        """The next kernel begins when all threads of the one before have ended."""
        self._message[device] += 1
        if (message := self._message[device]) == len(self._sizes):
            return
        blocks, each = mailbox.blocks_of(self._sizes[message])
        for block in range(blocks):
            number = self._numbers[device].get(block, 0) + 1
            self._numbers[device][block] = number
            for at in range(min(each, self._sizes[message] - block * each)):
                self._to_send[device].append((number, block, at, block * each + at))

    def _send(self, device: int) -> None:
        thread = self._taken(self._to_send[device])
        number, block, at, unit = thread
        for peer in set(range(self._n)) - {device}:
            for i in range(4):
                place = (number % self._slots, device, block, at, i)
                word = word_of(device, self._message[device], unit, i)
                self._flying.append((peer, place, word))
            self._to_receive[device].append((peer, *thread))

    def _arrive(self) -> None:
        peer, place, stored = self._taken(self._flying)
        self._boxes[peer][place] = stored

    def _poll(self, device: int) -> None:
        waiting = self._random.choice(self._to_receive[device])
        sender, number, block, at, unit = waiting
        box, place = self._boxes[device], (number % self._slots, sender, block, at)
        if all((*place, i) in box for i in range(4)):
            words = [box.pop((*place, i)) for i in range(4)]
            self.received[device][self._message[device], sender, unit] = words
            self._to_receive[device].remove(waiting)
            if not self._to_receive[device] and not self._to_send[device]:
                self._next_message(device)

    def _taken(self, items: list):
        return items.pop(self._random.randrange(len(items)))


def word_of(device: int, message: int, unit: int, i: int) -> tuple:
    return device, message, unit, i


def all_words(num_devices: int, device: int) -> dict:
    """What a device is to receive."""
    return {
        (message, sender, unit): [word_of(sender, message, unit, i) for i in range(4)]
        for message, size in enumerate(SIZES)
        for sender in set(range(num_devices)) - {device}
        for unit in range(size)
    }


@pytest.fixture
def small_blocks(monkeypatch):
    """Three thread blocks of two threads, so that small messages have parts of several blocks."""
    monkeypatch.setattr(mailbox, "BLOCKS", 3)
    monkeypatch.setattr(mailbox, "THREADS", 2)


SIZES = [1, 9, 2, 7, 7, 1, 1, 5, 12, 3]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_messages_arrive_whole_in_any_order_of_events(num_devices, seed):
    simulation = Simulation(num_devices, SIZES, slots=2, seed=seed)
    simulation.run()
    for device, received in enumerate(simulation.received):
        assert received == all_words(num_devices, device)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(3))
def test_with_one_slot_a_message_would_be_lost(seed):
    """The next one overwrites it: the receiver takes words of both, or waits forever."""
    simulation = Simulation(2, SIZES, slots=1, seed=seed)
    with contextlib.suppress(TimeoutError):
        simulation.run(20_000)
    assert simulation.received != [all_words(2, device) for device in (0, 1)]


@pytest.mark.parametrize("num_units", [1, 2, 127, 128, 129, 16_384, 99_999, 131_072])
def test_every_unit_belongs_to_one_thread_block(num_units):
    blocks, each = mailbox.blocks_of(num_units)
    assert 1 <= blocks <= mailbox.BLOCKS
    assert each <= mailbox.UNITS
    assert (blocks - 1) * each < num_units <= blocks * each


def test_the_largest_message_fits_a_mailbox():
    most = mailbox.MOST_BYTES // mailbox.UNIT_BYTES
    assert mailbox.blocks_of(most) == (mailbox.BLOCKS, mailbox.UNITS)
    box = mailbox.empty(3)
    assert box.shape == (2, 3, mailbox.BLOCKS, mailbox.UNITS, 4)
    assert (box == mailbox.EMPTY).all()


def test_both_words_in_place_of_an_empty_one_are_nan():
    word = np.uint32([mailbox.OTHER_NAN])
    assert np.isnan(word.view(np.float32)).all()
    assert np.isnan(word.view(jnp.bfloat16).astype(np.float32)).all()
    assert np.isnan(np.int32([mailbox.EMPTY]).view(np.float32)).all()


def test_a_table_holds_rank_and_addresses():
    addresses = [0x7F12_3456_7800, 0x7FAB_0000_0100, 256]
    table = mailbox.table(2, addresses)
    assert table.shape == (mailbox.LINKS,)
    assert table[0] == 2
    held = table[mailbox.ADDRESSES : mailbox.COUNTERS].view(np.int64)
    assert [int(one) for one in held] == addresses + [0] * (len(held) - 3)
    assert not table[mailbox.COUNTERS :].any()
    assert mailbox.ADDRESSES + 2 * mailbox.MOST_DEVICES <= mailbox.COUNTERS


@pytest.mark.parametrize(
    ("shape", "dtype", "sent", "why"),
    [
        ((1, 8, 2048), "bfloat16", "bfloat16", None),
        ((4, 8, 2048), "float32", "bfloat16", None),
        ((1, 2, 5), "int32", "int32", None),
        ((1, 2, 5), "float32", "float32", None),  # as halves
        ((1, 256, 2048), "bfloat16", "bfloat16", None),
        (
            (1, 513, 2048),
            "bfloat16",
            "bfloat16",
            "2101248 bytes are not a multiple of 16 up to 2097152",
        ),
        ((1, 1024, 512), "int32", "int32", "2097152 bytes are not a multiple of 8 up to 1048576"),
        ((1, 3), "float32", "float32", "12 bytes are not a multiple of 8"),
        ((1, 0), "float32", "float32", "0 bytes"),
        ((1, 1024, 2048), "float32", "float32", "8388608 bytes"),
        ((2, 8), "bfloat16", "bfloat16", "parts of bfloat16 are not added"),
        ((1, 8), "bfloat16", "float32", "bfloat16 is not rounded to float32"),
        ((1, 8), "bool", "bool", "bool is none of"),
    ],
)
def test_what_is_no_message_is_refused_by_name(shape, dtype, sent, why):
    parts = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    found = api.refusal(parts, jnp.dtype(sent))
    if why is None:
        assert found is None
    else:
        assert why in found


def on_two_devices(send, given, tables):
    """`send(part of given, table, arguments of a message)` on two virtual devices."""

    def local(given, links):
        mine = jax.tree.map(lambda x: x[0], given)
        sums, links = send(mine, links[0], dict(num_devices=2, axis="d"))
        return sums[None], links[None]

    spec = PartitionSpec("d")
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
    program = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
    )
    return jax.jit(program)(given, tables)


@pytest.mark.parametrize(
    ("shape", "dtype", "sent"),
    [
        ((3, 5, 8), "float32", "bfloat16"),
        ((2, 4), "float32", "float32"),
        ((1, 700, 8), "int32", "int32"),
    ],
)
def test_reference_is_a_gather_of_ordered_sums_that_counts_its_message(shape, dtype, sent):
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, *shape)) * 1000
    parts = jnp.asarray(values, dtype)
    tables = jnp.stack([mailbox.table(rank, [0, 0]) for rank in (0, 1)])
    tables = tables.at[:, mailbox.COUNTERS].set(-1)
    send = lambda parts, links, how: api.gather_sum(parts, jnp.dtype(sent), links, **how)
    sums, links = on_two_devices(send, parts, tables)
    total = parts[:, 0]
    for i in range(1, shape[0]):
        total = total + parts[:, i]
    for device in (0, 1):
        np.testing.assert_array_equal(sums[device], total.astype(sent))
    unit_bytes = mailbox.HALVES_BYTES if sent == "int32" else mailbox.UNIT_BYTES
    blocks, _ = mailbox.blocks_of(sums[0, 0].nbytes // unit_bytes)
    numbers = np.asarray(links)[:, mailbox.COUNTERS :]
    assert (numbers[:, 0] == 0).all()
    assert (numbers[:, 1:blocks] == 1).all()
    assert not numbers[:, blocks:].any()


def test_sums_of_experts_are_gathered_without_the_parts_of_weight_zero():
    R, k, D = 3, 2, 16
    values = np.random.default_rng(0).normal(size=(2, R * k + 1, D)).astype(np.float32)
    values[:, -1] = np.nan
    weights = np.float32([[[0.5, 0, 2], [1, 3, 0]]] * 2)
    rows = np.int32([[[0, 6, 4], [3, 2, 6]]] * 2)
    mixtures = Mixture(jnp.asarray(values, jnp.bfloat16), jnp.asarray(weights), jnp.asarray(rows))
    tables = jnp.stack([mailbox.table(rank, [0, 0]) for rank in (0, 1)])
    send = lambda mixture, links, how: api.gather_mixture(mixture, R, links, **how)
    sums, links = on_two_devices(send, mixtures, tables)
    for device in (0, 1):
        mixture = Mixture(*[x[device] for x in mixtures])
        for receiver in (0, 1):
            np.testing.assert_array_equal(sums[receiver, device], mixture.added(R))
    assert np.isfinite(np.asarray(sums, np.float32)).all()
    assert np.asarray(links)[:, mailbox.COUNTERS :].sum() == 2


def test_a_mixture_that_is_no_message_is_refused_by_name():
    given = lambda dtype, D: Mixture(jax.ShapeDtypeStruct((64, D), dtype), None, None)
    assert api.mixture_refusal(given(jnp.bfloat16, 2048), 256) is None
    assert "not float32" in api.mixture_refusal(given(jnp.float32, 64), 8)
    assert "multiple of 8" in api.mixture_refusal(given(jnp.bfloat16, 60), 8)
    assert "4194304 bytes" in api.mixture_refusal(given(jnp.bfloat16, 2048), 1024)
