"""Weights that are stacked for programs of several devices: which ones, and that nothing of them
changes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from peagle_jax.devices import Devices
from peagle_jax.parallel import stacks
from peagle_jax.parallel.partition import AXIS
from peagle_jax.parallel.stacks import Stacks

WHOLE, ROWS, COLUMNS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
GIVEN = [
    ((64,), jnp.float32, WHOLE),
    ((64, 8), jnp.float32, ROWS),
    ((64, 8), jnp.float32, COLUMNS),
    ((64,), jnp.float32, WHOLE),
    ((64, 8), jnp.float32, ROWS),
    ((256,), jnp.float8_e4m3fn, WHOLE),
    ((256,), jnp.uint8, WHOLE),
    ((64,), jnp.float32, WHOLE),
    ((3,), jnp.float32, WHOLE),  # the next slice would begin where no array begins
    ((3,), jnp.float32, WHOLE),
]


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices(2)


def arrays(devices: Devices) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    make = lambda shape, dtype: jnp.asarray(rng.normal(size=shape) * 9, dtype)
    return [
        jax.device_put(make(shape, dtype), devices.sharding(spec)) for shape, dtype, spec in GIVEN
    ]


def test_leaves_of_one_kind_are_one_operand_and_stay_what_they_are(devices):
    leaves = arrays(devices)
    weights, made = devices.take_weights(leaves), Stacks(leaves)
    assert len(weights) == len(GIVEN) - 2 - 1  # three vectors, and two matrices that are cut alike
    specs = [[one.sharding.spec for one in some] for some in (weights, leaves)]
    cut = dict(in_specs=(specs[0],), out_specs=specs[1], check_vma=False)
    shares = jax.shard_map(made.leaves, mesh=devices.mesh, **cut)
    for leaf, same in zip(leaves, jax.jit(shares)(weights), strict=True):
        assert (same.shape, same.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(same), np.asarray(leaf))


def test_shapes_are_stacked_as_arrays_are(devices):
    leaves = arrays(devices)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
    wanted, found = (Stacks(one).operands(one) for one in (leaves, shapes))
    for one, other in zip(wanted, found, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_a_platform_that_copies_slices_takes_all_weights_as_they_are(devices, monkeypatch):
    monkeypatch.setattr(stacks.dispatch, "platform", lambda: "tpu")
    leaves = arrays(devices)
    assert Stacks(leaves).operands(leaves) == leaves
