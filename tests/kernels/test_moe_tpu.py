"""Experts on a TPU, in Pallas' interpreter: against the reference, and with bits that do not depend
on other rows.

That the kernels compile for a TPU is tested in lab/tests/test_portability_tpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, formats
from pallas_kernels.device import V6E
from pallas_kernels.moe.reference import ExpertWeights
from tests.kernels.experts import mixture, moe

# F and D are no multiples of a tile nor, except for mxfp4, of a block of scales.
E, F, D, TOP_K = 4, 160, 320, 2
FORMS = ("bf16", "fp8", "fp8_rows", "mxfp4")
KINDS = ("mosaic_tpu", "reference")


def projection(form: str, *shape: int, bias: bool, seed: int) -> ExpertWeights:
    keys = jax.random.split(jax.random.key(seed), 3)
    made = jax.random.normal(keys[0], shape[:-1], jnp.bfloat16) if bias else None
    return ExpertWeights(*weight(form, *shape, keys=keys[1:]), made)


def weight(form: str, *shape: int, keys) -> tuple[jax.Array, jax.Array | None]:
    """Random values [..., N, K] and their scale, if any."""
    *leading, N, K = shape
    if form == "mxfp4":
        codes = lambda key, columns: jax.random.randint(key, (*leading, N, columns), 118, 128)
        cut = (K // 2, K // formats.GROUP)
        return tuple(codes(*one).astype(jnp.uint8) for one in zip(keys, cut, strict=True))
    values = jax.random.normal(keys[0], shape)
    if form == "bf16":
        return values.astype(jnp.bfloat16), None
    cut = (N, 1) if form == "fp8_rows" else (-(-N // formats.BLOCK), -(-K // formats.BLOCK))
    scale = jnp.exp(jax.random.normal(keys[1], (*leading, *cut)))
    return values.astype(jnp.float8_e4m3fn), scale


@functools.cache
def experts(form: str, bias: bool = False) -> tuple[ExpertWeights, ExpertWeights]:
    gate_up = projection(form, E, 2, F, D, bias=bias, seed=1)
    return gate_up, projection(form, E, D, F, bias=bias, seed=2)


def rows(R: int) -> tuple[jax.Array, jax.Array]:
    """x [R, D], logits [R, E]; expert 2 is chosen by few rows."""
    keys = jax.random.split(jax.random.key(0))
    logits = jax.random.normal(keys[0], (R, E)).at[:, 2].add(-2)
    return jax.random.normal(keys[1], (R, D), jnp.bfloat16), logits


def run(x, logits, weights, implementation, **options) -> np.ndarray:
    @jax.jit
    def total(x, logits, weights):
        made = mixture(
            x,
            logits,
            *weights,
            top_k=TOP_K,
            normalize=True,
            implementation=implementation,
            **options,
        )
        return jnp.einsum("kr,krd->rd", made.weights, made.values[made.rows].astype(jnp.float32))

    return np.asarray(total(x, logits, weights))


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("R", [5, 40])  # shared by all experts, and spread to them
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_those_of_the_reference(form, R):
    x, logits = rows(R)
    options = dict(limit=7.0) if form == "mxfp4" else {}
    weights = experts(form, bias=form in ("bf16", "mxfp4"))
    wanted = run(x, logits, weights, "reference", **options)
    found = run(x, logits, weights, "mosaic_tpu", **options)
    scale = np.abs(wanted).max()
    assert scale > 0
    # The reference rounds scaled fp8 weights to bfloat16, the kernel does not.
    np.testing.assert_allclose(found / scale, wanted / scale, atol=0.02)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_company(form):
    x, logits = rows(40)
    weights = experts(form)
    whole = run(x, logits, weights, "mosaic_tpu")
    for some in (slice(0, 1), slice(3, 12), slice(7, 40)):
        np.testing.assert_array_equal(
            run(x[some], logits[some], weights, "mosaic_tpu"), whole[some]
        )


def test_every_code_of_mxfp4_is_unpacked_as_the_reference_does():
    """One row of ones against 32 columns of one code each, and scales from 2^-126 to NaN."""
    codes = jnp.arange(16, dtype=jnp.uint8)
    values = jnp.broadcast_to((codes | codes << 4)[None, :, None], (1, 16, 16))
    scale = jnp.array([[1, 100, 127, 200, 252, 253, 254, 255]], jnp.uint8)
    run = {kind: jax.jit(functools.partial(moe, implementation=kind)) for kind in KINDS}
    for code in scale[0]:
        weight = jnp.tile(values, (1, 2, 1))  # 32 rows: a product's result for each code, twice
        down = ExpertWeights(weight, jnp.full((1, 32, 1), code))
        gate_up = ExpertWeights(
            jnp.full((1, 2, 32, 16), 0x22, jnp.uint8), jnp.full((1, 2, 32, 1), 127, jnp.uint8)
        )
        x = jnp.ones((1, 32), jnp.bfloat16) / 32
        one = (x, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), gate_up, down)
        found, wanted = (np.float32(run[kind](*one)) for kind in KINDS)
        np.testing.assert_allclose(found, wanted, rtol=0.01)


@pytest.mark.parametrize(
    ("x", "form", "why"),
    [
        (jnp.float32, "bf16", "activations must be bfloat16"),
        (jnp.bfloat16, "f32", "plain weights must be"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_or_left_to_the_reference(x, form, why):
    weights = experts("bf16")
    if form == "f32":
        weights = tuple(ExpertWeights(one.values.astype(jnp.float32)) for one in weights)
    rows_, logits = rows(3)
    with pytest.raises(NotImplementedError, match=why):
        run(rows_.astype(x), logits, weights, "mosaic_tpu")
    with dispatch.assume(V6E):
        assert run(rows_.astype(x), logits, weights, None).shape == (3, D)
