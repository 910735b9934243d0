"""The ladder's kernels in Mosaic's interpreter: each step gives the reference's result, without
races."""

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.lesson import reference, specs
from pallas_kernels import dispatch
from pallas_kernels.device import H200
from tests.kernels.compiled import dequantize

race_free = pytest.mark.usefixtures("race_free")
N, K = 256, 640
EXPERTS, TOP_K = 5, 2


def module(step: str):
    return importlib.import_module(f"lab.lesson.mosaic_{step}")


def launch(num_sms: int = H200.num_sms) -> dispatch.Launch:
    found = dispatch.resolve("ladder", "mosaic_gpu", chips=specs.CHIPS)
    return found._replace(device=replace(found.device, num_sms=num_sms))


def whole(seed: int, *shape: int, size: float = 3) -> jax.Array:
    """Whole numbers: the interpreter's product of one step is exact, whatever the number of
    rows."""
    return jnp.asarray(np.round(size * np.asarray(jax.random.normal(jax.random.key(seed), shape))))


def operands(step: str, R: int, columns: int = K) -> tuple[jax.Array, ...]:
    """x [R, columns], the weight [N, K] and its scale, if any.

    Blocks 0 and 2 of K are large and cancel each other: what a float32 sum lost to them shows in
    the result.
    """
    x = whole(0, R, columns).astype(jnp.bfloat16)
    x = x.at[:, 256:384].set(x[:, :128])
    values = whole(1, N, K)
    values = values.at[:, 256:384].set(-values[:, :128])
    sizes = jnp.array([2.0**20, 1, 2.0**20, 1, 1])
    if step < "5":
        return x, (values * sizes.repeat(128)).astype(jnp.bfloat16)
    scale = jnp.broadcast_to(sizes, (N // 128, K // 128))
    return x, values.astype(jnp.float8_e4m3fn), scale


def in_float64(x, values, scale=None) -> np.ndarray:
    weight = np.asarray(dequantize(values, scale, jnp.float32), np.float64)
    return np.asarray(x, np.float64)[:, : weight.shape[1]] @ weight.T


def assert_rounded(found: jax.Array, x, values, scale=None):
    """To the rounding of a bfloat16 result, and of the float32 sums that it comes from."""
    wanted = in_float64(x, values, scale)
    sizes = in_float64(np.abs(x), np.abs(values), scale)
    assert found.dtype == jnp.bfloat16
    assert (
        np.abs(np.asarray(found, np.float64) - wanted) <= 2**-8 * np.abs(wanted) + 1e-6 * sizes
    ).all()


@pytest.mark.sampled(2, slow=2)
@race_free
@pytest.mark.parametrize("step", specs.STEPS[:-1])
def test_a_step_multiplies(step):
    args = operands(step, 16, columns=K + 64)
    assert_rounded(module(step).product(*args, launch=launch()), *args)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("step", specs.STEPS[:-1])
def test_a_row_has_the_same_bits_in_any_company(step):
    x, *weight = operands(step, 24)
    product = lambda x: np.asarray(module(step).product(x, *weight, launch=launch()), np.float32)
    together = product(x)
    assert np.array_equal(product(x[8:16]), together[8:16])
    exact = np.asarray(jnp.asarray(in_float64(x, *weight), jnp.bfloat16), np.float32)
    assert (together != exact).mean() > 0.3  # sums are rounded, so another order would show


@race_free
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_sms", [2, 132])
def test_experts_multiply_the_rows_that_chose_them(num_sms):
    """Expert 0 has no rows, expert 4 more than an item holds: its nine rows are two items."""
    grouped, tokens, R = module("6_grouped"), 8, 9
    ids = jnp.stack([jnp.full(R, 4), 1 + jnp.arange(R) % 3]).astype(jnp.int32)
    x = whole(3, R, 384).astype(jnp.bfloat16)
    values = whole(4, EXPERTS, 256, 384).astype(jnp.float8_e4m3fn)
    scale = jnp.exp(jax.random.normal(jax.random.key(5), (EXPERTS, 2, 3)))
    rows, work = grouped.plan(x, ids, EXPERTS, tokens)
    assert (work.num_items[0], work.experts[:5].tolist()) == (5, [1, 2, 3, 4, 4])
    args = rows, values, scale, work.experts, work.num_items
    found = grouped.product(*args, tokens=tokens, launch=launch(num_sms))
    wanted = reference.grouped(*args, tokens=tokens)
    for choice, row in np.ndindex(TOP_K, R):
        slot, expert = int(work.slots[choice, row]), int(ids[choice, row])
        own = x[row][None], values[expert], scale[expert]
        assert_rounded(found[slot][None], *own)
        assert np.array_equal(wanted[slot], reference.product(*own)[0])


@pytest.mark.parametrize(
    ("x", "weight", "why"),
    [
        ((12, 640), (256, 640), "multiples of 8"),
        ((8, 640), (192, 640), r"multiple of \[128, 64\]"),
        ((8, 640), (256, 600), r"multiple of \[128, 64\]"),
        ((8, 576), (256, 640), "fewer columns than the weight"),
    ],
)
@pytest.mark.parametrize("step", specs.STEPS[:4])
def test_other_shapes_are_refused(step, x, weight, why):
    with pytest.raises(ValueError, match=why):
        module(step).product(jnp.zeros(x, jnp.bfloat16), jnp.zeros(weight, jnp.bfloat16), launch())
