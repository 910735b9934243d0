"""Messages between GPUs: their parts, tables, and the definition by XLA's all-gather.

The kernel itself needs GPUs; `test_compile.py` compiles it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.moe.api import Mixture
from pallas_kernels.peer_gather import api, mailbox


def test_the_largest_message_fits_a_mailbox():
    most = mailbox.MOST_BYTES // mailbox.UNIT_BYTES
    assert mailbox.blocks_of(most) == (mailbox.BLOCKS, mailbox.UNITS)
    box = mailbox.empty(3)
    assert box.shape == (2, 3, mailbox.BLOCKS, mailbox.UNITS, 4)
    assert (box == mailbox.EMPTY).all()


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
        ((1, 1024, 512), "int32", "int32", "2097152 bytes are not a multiple of 8 up to 1048576"),
        ((1, 3), "float32", "float32", "12 bytes are not a multiple of 8"),
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
    """`send(this device's part of given, its table, arguments of a message)` on two virtual
    devices.
    """

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
