"""What numpy does in place of jax outside of `jax.jit` has the same bits, dtypes and devices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests import eager

FLOATS = np.array([[1, -0.0, 3.1415927, np.inf], [1e-40, 65504, -1e38, 1.00390625]], np.float32)
BYTES = np.arange(12, dtype=np.uint8).reshape(3, 4) * 23

OPERATIONS = {
    "asarray": lambda x: jnp.asarray(x),
    "cast": lambda x: jnp.asarray(x).astype(jnp.bfloat16),
    "widen": lambda x: jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32),
    "signed": lambda x: jnp.asarray(x).astype(jnp.int8).astype(jnp.int32),
    "e4m3": lambda x: jnp.asarray(x).astype(jnp.float8_e4m3fn),
    "wide": lambda x: jnp.asarray(x).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16),
    "whole": lambda x: jnp.asarray(x).astype(jnp.int32),
    "row": lambda x: jnp.asarray(x)[-1],
    "column": lambda x: jnp.asarray(x)[:, 1:3],
    "steps": lambda x: jnp.asarray(x)[::2, ::-1],
    "rows": lambda x: jnp.asarray(x)[np.array([1, 0])],
    "set": lambda x: jnp.asarray(x).at[0, 1:].set(x[0, 0]),
    "beyond": lambda x: jax.lax.dynamic_slice(jnp.asarray(x), (5, -9), (1, 2)),
    "transpose": lambda x: jnp.asarray(x).T[:, None],
    "reshape": lambda x: jnp.asarray(x).reshape(2, -1, 2),
    "broadcast": lambda x: jnp.broadcast_to(jnp.asarray(x)[:, :1], (3, x.shape[0], 5)),
    "concatenate": lambda x: jnp.concatenate([jnp.asarray(x), jnp.asarray(x)[:1]]),
    "ones": lambda x: jnp.ones((3, 2), x.dtype),
    "full": lambda x: jnp.full((2, 3), 1.5),
    "scalar": lambda x: jnp.asarray(2.5) * jnp.asarray(x),
    "iota": lambda x: jax.lax.broadcasted_iota(jnp.int32, (2, 3), 1),
    "arange": lambda x: jnp.arange(3, dtype=jnp.float32),
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("x", [FLOATS, FLOATS.astype(ml_dtypes.bfloat16), BYTES, BYTES > 90])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_jax(name, x):
    if name == "signed" and x.dtype.kind != "u":
        pytest.skip("a conversion of whole numbers")
    found = OPERATIONS[name](x)
    with eager.moved_by_jax():
        wanted = OPERATIONS[name](x)
    same = lambda one: (one.shape, one.dtype, one.weak_type, one.committed, one.sharding)
    assert same(found) == same(wanted)
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_a_result_is_an_array_of_its_own():
    memory = np.ones(2**16, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    aligned = memory[first : first + 2**15]  # to 64 bytes: jax would not copy it
    found = jnp.asarray(aligned)
    memory[:] = 2
    assert (np.asarray(found) == 1).all()
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
    assert found.is_deleted()
    assert (np.asarray(donated) == 2).all()


def test_arrays_of_a_chosen_device_stay_there():
    device = jax.devices()[-1]
    x = jax.device_put(FLOATS, device)
    assert x[0].devices() == x.T.devices() == {device}
    with jax.default_device(device):
        assert jnp.asarray(FLOATS).devices() == jnp.zeros(3).devices() == {device}
