"""Norm and router in one kernel, and with the plan, beside the kernels that they replace, in
Mosaic's interpreter.

Rows have 1,024 columns, so a block has two warpgroups: XLA runs at most 32 computations of a CPU at
a time, and eight blocks of four warpgroups would wait for each other forever. Four blocks may have
four warpgroups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_tiles
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.moe import api, mosaic_norm, mosaic_plan
from pallas_kernels.moe.paths import Routing, TuningConfig
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights
from pallas_kernels.rms_norm import mosaic_gpu as rms_norm
from tests.kernels.experts import launch, without

race_free = pytest.mark.usefixtures("race_free")
EXPERTS, CHOSEN = 128, 8
DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


def given(
    R: int, D: int, *, parts: int = 4, biases: bool = False, massive: bool = False
) -> list[jax.Array | None]:
    """Arguments of `norm_and_route`; `massive`: a norm exceeds float16's largest number."""
    keys = jax.random.split(jax.random.key(R + D), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    half = lambda x: x.astype(jnp.bfloat16)
    h, bias, router_bias = half(normal(keys[0], R, D)), normal(keys[1], D), normal(keys[2], EXPERTS)
    scale, weight = half(1 + normal(keys[3], D) / 8), half(normal(keys[4], EXPERTS, D) / D**0.5)
    if massive:
        h, scale = h.at[0, 3].set(30000), scale.at[3].set(3000)
    both = (half(bias), half(router_bias)) if biases else (None, None)
    return [h, normal(keys[5], parts, R, D), both[0], scale, weight, both[1]]


def assert_same_bits(args: list, *, normalize: bool = True) -> None:
    h, parts, bias, scale, weight, router_bias = args
    R = len(h)
    config = TuningConfig.choose(R, EXPERTS, CHOSEN, hopper=True, quantized=False)
    routing = Routing.of(R, EXPERTS, Choice(CHOSEN, normalize), config, launch())
    added = rms_norm.Added(parts, bias=bias)
    norm = dict(eps=1e-6, out_dtypes=DTYPES)
    rows = rms_norm.add_rms_norm(h, added, scale, inner_eps=None, launch=launch(), **norm)
    logits = linear(rows[1], weight, out_dtype=jnp.float32, implementation="mosaic_gpu")
    wanted = *rows, *mosaic_plan.route_and_plan(logits, router_bias, routing)
    found = mosaic_norm.norm_and_route(*args, routing, **norm)
    count = int(wanted[-1][0])
    for one, other in zip(specified(wanted, R, count), specified(found, R, count), strict=True):
        assert one.tobytes() == other.tobytes()


def assert_same_logits(args: list) -> None:
    """Those of `norm_and_product`, with the rows."""
    h, parts, bias, scale, weight, _ = args
    norm = dict(eps=1e-6, out_dtypes=DTYPES, launch=launch())
    added = rms_norm.Added(parts, bias=bias)
    rows = rms_norm.add_rms_norm(h, added, scale, inner_eps=None, **norm)
    logits = linear(rows[1], weight, out_dtype=jnp.float32, implementation="mosaic_gpu")
    found = mosaic_norm.norm_and_product(*args[:-1], **norm)
    for one, other in zip((*rows, logits), found, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def specified(results, R: int, count: int) -> list[np.ndarray]:
    *rows, weights, slots, experts, num_items = map(np.asarray, results)
    return [*rows, weights[:, :R], slots[:, :R], experts[:count], num_items]


@race_free
@pytest.mark.parametrize(
    ("R", "options"),
    [
        pytest.param(1, dict(biases=True), marks=pytest.mark.exhaustive),
        pytest.param(8, dict(parts=1), marks=pytest.mark.exhaustive),
        pytest.param(9, dict(massive=True), marks=pytest.mark.slow),
        (16, dict(biases=True, parts=2)),
    ],
)
def test_the_bits_are_those_of_the_three_kernels(R, options):
    assert_same_bits(given(R, 1024, **options))


@race_free
@pytest.mark.parametrize(
    ("R", "options"),
    [
        (17, dict(biases=True, massive=True)),  # a row in the last cluster
        pytest.param(64, dict(), marks=pytest.mark.exhaustive),
        pytest.param(75, dict(biases=True, parts=2), marks=pytest.mark.exhaustive),
        pytest.param(3, dict(parts=1), marks=pytest.mark.exhaustive),
    ],
)
def test_the_bits_of_the_logits_are_those_of_the_two_kernels(R, options):
    assert_same_logits(given(R, 1024, **options))


@pytest.mark.slow
@race_free
def test_clusters_of_16_rows_have_the_bits_of_the_two_kernels(monkeypatch):
    """Those of more than 64 rows: here two, of which the last has 11 rows."""
    assert mosaic_norm.tokens_of(64) == 8 < mosaic_norm.tokens_of(65) == 16
    monkeypatch.setattr(mosaic_norm, "tokens_of", lambda R: 16)
    assert_same_logits(given(27, 1024, biases=True, parts=2))


@pytest.mark.slow
@race_free
def test_a_mixture_with_its_norm_has_the_bits_of_both_alone(monkeypatch):
    R, D, F = 2, 1024, 128
    h, parts, bias, scale, weight, router_bias = given(R, D, biases=True)

    def experts(seed, *shape):
        values = jax.random.normal(jax.random.key(seed), shape).astype(jnp.float8_e4m3fn)
        of_blocks = *shape[:-2], -(-shape[-2] // 128), shape[-1] // 128
        scale = jnp.full(of_blocks, 2**-5, jnp.float32)
        return ExpertWeights(fp8_tiles.arrange(values), scale)

    both = experts(0, EXPERTS, 2, F, D), experts(1, EXPERTS, D, F)
    router = api.Router(weight, None, Choice(2, True, router_bias))
    calls = []
    kernel = mosaic_norm.norm_and_route
    monkeypatch.setattr(
        mosaic_norm, "norm_and_route", lambda *a, **k: calls.append(k) or kernel(*a, **k)
    )

    def run(implementation="mosaic_gpu"):
        stream, mixed = api.normed_mixture(
            h[:, None],
            parts[:, :, None],
            bias,
            api.Norm(scale, 1e-6),
            router,
            Experts(*both),
            implementation=implementation,
        )
        return stream, mixed.added(R)

    found = run()
    assert [call["out_dtypes"] for call in calls] == [DTYPES]
    referred = run("reference")
    without(monkeypatch, "norm_route", "norm_product")
    wanted = run()
    assert len(calls) == 1
    assert found[0].shape == (R, 1, D)
    for one, other, third in zip(found, wanted, referred, strict=True):
        assert np.array_equal(one, other)
        step = 2**-6 * float(jnp.abs(third).max())
        np.testing.assert_allclose(*map(np.float32, (one, third)), atol=step)


@pytest.mark.parametrize(
    ("parts", "said"),
    [((4, 4, 512), "delta.shape="), ((1, 4, 1024), "delta.shape="), ((33, 2, 1024), "at most 32")],
)
def test_parts_that_do_not_fit_are_refused(parts, said):
    h, _, bias, scale, weight, router_bias = given(2, 1024, biases=True)
    router = api.Router(weight, None, Choice(CHOSEN, True, router_bias))
    weights = ((EXPERTS, 2, 128, 1024), (EXPERTS, 1024, 128))
    made = [ExpertWeights(jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for shape in weights]
    norm = api.Norm(scale, 1e-6)
    with pytest.raises(ValueError, match=said):
        api.normed_mixture(
            h, jnp.zeros(parts), bias, norm, router, Experts(*made), implementation="mosaic_gpu"
        )


def test_the_router_reads_bfloat16():
    routing = Routing(CHOSEN, True, 8, True, 16, launch())
    with pytest.raises(ValueError, match="bfloat16 rows"):
        mosaic_norm.norm_and_route(*given(1, 1024), routing, eps=1e-6, out_dtypes=DTYPES[::-1])
    with pytest.raises(ValueError, match="bfloat16 rows"):
        mosaic_norm.norm_and_product(
            *given(1, 1024)[:-1], eps=1e-6, launch=launch(), out_dtypes=DTYPES[::-1]
        )
