"""Messages between GPUs: their protocol on simulated ones, tables, and the definition by XLA's all-gather.

The kernel itself needs GPUs; `test_compile.py` compiles it.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.peer_gather import api, mailbox


class Simulation:
    """GPUs that send messages in the order of `sizes`. Anything that may happen next happens, at random: a thread
    stores a pair, eight bytes of a stored pair arrive, a thread reads a pair that it waits for.

    Args:
      sizes: pairs of each message.
      slots: of a mailbox.
    """

    def __init__(self, num_devices: int, sizes: list[int], slots: int, seed: int):
        self._random, self._n, self._sizes, self._slots = (
            random.Random(seed),
            num_devices,
            sizes,
            slots,
        )
        self._boxes = [
            {} for _ in range(num_devices)
        ]  # (slot, sender, block, pair, half): (word, number)
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
            number = mailbox.number_after(self._numbers[device].get(block, 0))
            self._numbers[device][block] = number
            for at in range(min(each, self._sizes[message] - block * each)):
                self._to_send[device].append((number, block, at, block * each + at))

    def _send(self, device: int) -> None:
        thread = self._taken(self._to_send[device])
        number, block, at, pair = thread
        for peer in set(range(self._n)) - {device}:
            for half in (0, 1):
                place = (number % self._slots, device, block, at, half)
                word = word_of(device, self._message[device], pair, half)
                self._flying.append((peer, place, (word, number)))
            self._to_receive[device].append((peer, *thread))

    def _arrive(self) -> None:
        peer, place, stored = self._taken(self._flying)
        self._boxes[peer][place] = stored

    def _poll(self, device: int) -> None:
        waiting = self._random.choice(self._to_receive[device])
        sender, number, block, at, pair = waiting
        box, place = self._boxes[device], (number % self._slots, sender, block, at)
        words = [box.get((*place, half), (0, 0)) for half in (0, 1)]
        if all(found == number for _, found in words):
            self.received[device][self._message[device], sender, pair] = [word for word, _ in words]
            self._to_receive[device].remove(waiting)
            if not self._to_receive[device] and not self._to_send[device]:
                self._next_message(device)

    def _taken(self, items: list):
        return items.pop(self._random.randrange(len(items)))


def word_of(device: int, message: int, pair: int, half: int) -> tuple:
    return device, message, pair, half


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
        wanted = {
            (message, sender, pair): [word_of(sender, message, pair, half) for half in (0, 1)]
            for message, size in enumerate(SIZES)
            for sender in set(range(num_devices)) - {device}
            for pair in range(size)
        }
        assert received == wanted


@pytest.mark.usefixtures("small_blocks")
def test_with_one_slot_a_message_would_be_lost():
    """The receiver would wait forever for a message that the next one has overwritten."""
    simulation = Simulation(2, SIZES, slots=1, seed=0)
    with pytest.raises(TimeoutError):
        simulation.run(20_000)


@pytest.mark.parametrize("num_pairs", [1, 2, 127, 128, 129, 16_384, 99_999, 262_144])
def test_every_pair_belongs_to_one_thread_block(num_pairs):
    blocks, each = mailbox.blocks_of(num_pairs)
    assert 1 <= blocks <= mailbox.BLOCKS
    assert each <= mailbox.PAIRS
    assert (blocks - 1) * each < num_pairs <= blocks * each


def test_the_largest_message_fits_a_mailbox():
    most = mailbox.MOST_BYTES // mailbox.PAIR_BYTES
    assert mailbox.blocks_of(most) == (mailbox.BLOCKS, mailbox.PAIRS)
    assert mailbox.mailbox_shape(2) == (2, 2, mailbox.BLOCKS, mailbox.PAIRS, 4)


def test_numbers_alternate_and_skip_that_of_an_empty_mailbox():
    assert mailbox.number_after(0) == 1
    assert mailbox.number_after(7) == 8
    assert mailbox.number_after(2**32 - 1) == 2


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


@pytest.mark.parametrize(
    ("shape", "dtype", "sent"),
    [
        ((3, 5, 8), "float32", "bfloat16"),
        ((2, 4), "float32", "float32"),
        ((1, 700, 8), "int32", "int32"),
    ],
)
def test_reference_is_a_gather_of_ordered_sums_that_counts_its_message(shape, dtype, sent):
    devices = jax.devices("cpu")[:2]
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, *shape)) * 1000
    parts = jnp.asarray(values, dtype)
    tables = jnp.stack([mailbox.table(rank, [0, 0]) for rank in (0, 1)])
    tables = tables.at[:, mailbox.COUNTERS].set(-1)

    def local(parts, links):
        rules = dict(num_devices=2, axis="d")
        sums, links = api.gather_sum(parts[0], jnp.dtype(sent), links[0], **rules)
        return sums[None], links[None]

    spec = PartitionSpec("d")
    mesh = Mesh(np.array(devices), ("d",))
    gather = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
    )
    sums, links = jax.jit(gather)(parts, tables)
    total = parts[:, 0]
    for i in range(1, shape[0]):
        total = total + parts[:, i]
    for device in (0, 1):
        np.testing.assert_array_equal(sums[device], total.astype(sent))
    blocks, _ = mailbox.blocks_of(sums[0, 0].nbytes // mailbox.PAIR_BYTES)
    numbers = np.asarray(links)[:, mailbox.COUNTERS :]
    assert (numbers[:, 0] == 2).all()
    assert (numbers[:, 1:blocks] == 1).all()
    assert not numbers[:, blocks:].any()
