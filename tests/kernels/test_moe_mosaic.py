"""Kernels of a mixture of experts in Mosaic's interpreter: routing, worklist, grouped products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import BLOCK
from pallas_kernels.moe import mosaic_gpu, mosaic_plan, mosaic_route
from pallas_kernels.moe.paths import Routing, TuningConfig
from pallas_kernels.moe.reference import Choice, ExpertWeights, Mixture
from tests.kernels.compiled import make_worklist, routed
from tests.kernels.experts import by_hand, launch, logits_of, mixture, moe

pytestmark = pytest.mark.sampled(1)

race_free = pytest.mark.usefixtures("race_free")
both_chips = pytest.mark.usefixtures("chip")
every_chip = pytest.mark.usefixtures("chip")
LIMIT = 1.5  # low enough to clamp some gates and ups


@functools.cache
def bias_of(E: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (E,)).astype(jnp.bfloat16)


def by_definition(logits, bias, k, normalize) -> tuple[np.ndarray, np.ndarray]:
    logits = logits if bias is None else np.asarray(logits) + np.asarray(bias, np.float32)
    return tuple(map(np.asarray, routed(logits, k, normalize)))


def plan(logits, bias, k: int, *, normalize=True, config: TuningConfig | None = None):
    """What `route_and_plan` makes for `mixture`."""
    R, E = logits.shape
    config = config or TuningConfig.choose(R, E, k, hopper=True, quantized=False)
    routing = Routing.of(R, E, Choice(k, normalize), config, launch())
    return mosaic_plan.route_and_plan(logits, bias, routing)


def assert_weights(found: jax.Array, wanted: np.ndarray):
    """[k, R'] as [R, k], to a few units in the last place; sums are taken in another order."""
    np.testing.assert_allclose(np.asarray(found)[:, : len(wanted)].T, wanted, rtol=1e-6)


def assert_worklist(found, ids: np.ndarray, E: int, config: TuningConfig):
    """slots, experts and num_items without their unspecified entries."""
    slots, experts, num_items = map(np.asarray, found)
    work = make_worklist(jnp.asarray(ids).T, E, config.tokens, config.shared)
    wanted = int(work.num_items[0])
    assert (num_items == wanted).all()
    assert np.array_equal(experts[:wanted], work.experts[:wanted])
    assert np.array_equal(slots[:, : len(ids)], work.slots)


ROUTES = [
    # R, E, k, normalize, bias, ties
    (5, 32, 4, True, True, False),
    (1, 128, 8, True, False, False),
    (12, 128, 8, True, False, True),
    (64, 128, 8, False, True, True),  # straight to registers
    (70, 64, 4, False, False, False),
    (130, 128, 8, True, False, True),
]


@pytest.mark.sampled(1)
@race_free
@pytest.mark.parametrize(("R", "E", "k", "normalize", "bias", "ties"), ROUTES)
def test_routing_is_the_definition(R, E, k, normalize, bias, ties):
    logits, bias = logits_of(R, E, ties=ties), bias_of(E) if bias and not ties else None
    wanted, ids = by_definition(logits, bias, k, normalize)
    weights, found, *_ = mosaic_route.route(logits, bias, k, normalize, launch())
    assert np.array_equal(np.asarray(found)[:, :R].T, ids)
    assert_weights(weights, wanted)


@pytest.mark.sampled(1, slow=4)
@race_free
@pytest.mark.parametrize(
    ("R", "E", "k", "normalize", "bias", "ties"),
    [
        *ROUTES,
        (16, 128, 6, True, True, False),  # one block
        (17, 96, 8, True, True, False),  # four, and the last two have no rows
        (256, 128, 8, True, False, True),
    ],
)
@both_chips
def test_the_plan_is_the_worklist(R, E, k, normalize, bias, ties):
    logits, bias = logits_of(R, E, ties=ties), bias_of(E) if bias and not ties else None
    wanted, ids = by_definition(logits, bias, k, normalize)
    weights, *work = plan(logits, bias, k, normalize=normalize)
    assert_weights(weights, wanted)
    assert_worklist(work, ids, E, TuningConfig.choose(R, E, k, hopper=True, quantized=False))
    routed, *_ = mosaic_route.route(logits, bias, k, normalize, launch())
    assert np.array_equal(weights[:, :R], routed[:, :R])  # whichever of the two kernels routes


@pytest.mark.slow
@race_free
def test_a_plan_leaves_nothing_behind():
    """A second launch of the same program, as in a CUDA graph, works too."""
    logits, others = logits_of(70, 32), logits_of(70, 32, ties=True)
    once = plan(others, None, 4)
    twice = jax.jit(lambda *both: [plan(logits, None, 4) for logits in both])(logits, others)[1]
    for found, wanted in zip(twice, once, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.slow
@race_free
@pytest.mark.parametrize(("R", "shared", "tokens"), [(11, True, 16), (70, False, 24)])
def test_all_rows_may_go_to_the_same_experts(R, shared, tokens):
    """Then other experts have no items, and these have many rows."""
    logits = jnp.zeros((R, 32)).at[:, jnp.array([3, 31])].set(jnp.array([1.0, 2.0]))
    config = TuningConfig(tokens, shared, (2, 2))
    weights, *work = plan(logits, None, 2, config=config)
    wanted, ids = by_definition(logits, None, 2, True)
    assert set(ids.ravel().tolist()) == {3, 31}
    assert_weights(weights, wanted)
    assert_worklist(work, ids, 32, config)


@race_free
def test_experts_that_are_masked_are_chosen_last():
    """Three of a row's logits are not -inf, and it has four experts."""
    masked = jnp.full((5, 32), -jnp.inf).at[:, jnp.array([3, 9, 31])].set(jnp.arange(3.0))
    wanted, ids = by_definition(masked, None, 4, True)
    assert ids.tolist() == [[31, 9, 3, 0]] * 5
    weights, found, *_ = mosaic_route.route(masked, None, 4, True, launch())
    assert np.array_equal(found[:, :5].T, ids)
    assert_weights(weights, wanted)
    weights, *work = plan(masked, None, 4)
    assert_weights(weights, wanted)
    assert_worklist(work, ids, 32, TuningConfig.choose(5, 32, 4, hopper=True, quantized=False))


def projection(form: str, shape: tuple[int, ...], *, bias: bool, seed: int) -> ExpertWeights:
    """Values of about 1 / 8."""
    keys = jax.random.split(jax.random.key(seed), 3)
    values = np.round(2 * np.asarray(jax.random.normal(keys[0], shape)))
    bias = jax.random.normal(keys[1], shape[:-1]).astype(jnp.bfloat16) if bias else None
    if form == "bf16":
        return ExpertWeights(jnp.asarray(values / 16, jnp.bfloat16), None, bias)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    scale = np.exp(0.3 * np.asarray(jax.random.normal(keys[2], blocks))) / 16
    return ExpertWeights(jnp.asarray(values, jnp.float8_e4m3fn), jnp.asarray(scale), bias)


@functools.cache
def experts(form: str, E: int = 8, D: int = 128, F: int = 192, *, bias: bool = False):
    F = F if form == "bf16" else 128
    gate_up = projection(form, (E, 2, F, D), bias=bias, seed=0)
    return gate_up, projection(form, (E, D, F), bias=bias, seed=1)


@functools.cache
def rows(R: int, D: int = 128) -> jax.Array:
    return jnp.asarray(np.round(jax.random.normal(jax.random.key(7), (R, D))), jnp.bfloat16)


def added(mixed: Mixture, R: int) -> np.ndarray:
    """The mixture: the sum of the experts' rows, as its readers compute it."""
    values, weights, places = map(np.asarray, mixed)
    assert values.dtype == jnp.bfloat16
    total = np.float32(0)
    for share, place in zip(weights[:, :R], places[:, :R], strict=True):
        total = total + share[:, None] * values[place].astype(np.float32)
    return total


def mix(x, logits, weights, implementation="mosaic_gpu", *, k=2, **options) -> np.ndarray:
    options = dict(normalize=True) | options
    run = functools.partial(mixture, top_k=k, implementation=implementation, **options)
    if implementation == "reference":
        run = jax.jit(run)  # an interpreted kernel is a program already
    return added(run(x, logits, *weights), x.shape[0])


@pytest.mark.sampled(1, slow=2)
@race_free
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("R", "bias", "limit"), [(3, True, LIMIT), (11, False, None), (21, True, None)]
)
@every_chip
def test_experts_compute_as_in_float64(form, R, bias, limit):
    """Items that share the rows of x, and sorted ones; few rows, so that experts stay without."""
    weights = experts(form, bias=bias and form == "bf16")
    shares, ids = by_definition(logits_of(R, 8), None, 2, True)
    wanted = by_hand(rows(R), ids, shares, *weights, limit, jnp.bfloat16)
    chosen = jnp.asarray(ids), jnp.asarray(shares)
    found = moe(rows(R), *chosen, *weights, limit=limit, implementation="mosaic_gpu")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=0, atol=0.01 * np.abs(wanted).max()
    )


def in_slots(x: jax.Array, slots: jax.Array, size: int, *_) -> jax.Array:
    """As `quantize.mosaic_gpu.spread`, in plain jnp; rows without a value are NaN."""
    copies = jnp.broadcast_to(x, (len(slots), *x.shape))
    return jnp.full((size, x.shape[1]), jnp.nan, x.dtype).at[slots[:, : len(x)]].set(copies)


@pytest.mark.sampled(1)
@race_free
@pytest.mark.parametrize("shared", [True, False])
@both_chips
def test_an_expert_without_rows_is_not_read(shared):
    """It and a buffer's rows without a value may hold anything: here NaN."""
    R, tokens, E = 4, 8, 8
    gate_up, down = experts("bf16", bias=True)
    ids = jnp.array([[0, 6], [0, 2], [2, 0], [6, 0]], jnp.int32)
    poison = jnp.array([1, 3, 4, 5, 7])
    bad = [p._replace(values=p.values.at[poison].set(jnp.nan)) for p in (gate_up, down)]
    config = TuningConfig(tokens, shared, (2, 2))
    work = make_worklist(ids.T, E, tokens, shared)
    items = (work.experts, work.num_items, work.items)
    source = rows(R) if shared else in_slots(rows(R), work.slots, work.items * tokens)

    def run(gate_up, down):
        inner = mosaic_gpu.gate_up(source, gate_up, *items, LIMIT, config, launch())
        made = mosaic_gpu.down(inner, down, *items, config, launch())
        return np.asarray(made)[np.asarray(work.slots.T)]

    found = run(*bad)
    assert np.isfinite(found).all()
    assert np.array_equal(found, run(gate_up, down))
    ones = np.ones((R, 1))
    for j in range(2):
        wanted = by_hand(
            rows(R), np.asarray(ids)[:, j : j + 1], ones, gate_up, down, LIMIT, jnp.bfloat16
        )
        np.testing.assert_allclose(found[:, j], wanted, rtol=0, atol=0.01 * np.abs(wanted).max())


@pytest.mark.sampled(1, slow=1)
@race_free
@pytest.mark.parametrize(
    ("R", "form", "options"),
    [
        (5, "bf16", dict(router_bias=bias_of(16), limit=LIMIT)),
        (12, "fp8", dict(normalize=False)),
        (21, "bf16", dict(router_bias=bias_of(16), normalize=False)),
        (70, "fp8", dict()),
    ],
)
@both_chips
def test_a_mixture_is_the_reference(R, form, options):
    weights = experts(form, E=16, F=64, bias="limit" in options)
    x, logits = rows(R), logits_of(R, 16)
    wanted = mix(x, logits, weights, "reference", **options)
    found = mix(x, logits, weights, **options)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@every_chip
def test_a_row_has_the_same_bits_in_any_company(form):
    """Alone, among 5 that share items, among 21 that are sorted; tiles have 8 rows."""
    weights, x, logits = experts(form, E=16, F=64), rows(21), logits_of(21, 16)
    run = functools.partial(mix, weights=weights, router_bias=bias_of(16), normalize=False)
    whole = run(x, logits)
    for part in (slice(20, 21), slice(3, 8)):
        assert np.array_equal(run(x[part], logits[part]), whole[part])


def test_what_the_kernels_cannot_do_they_say():
    weights, ids = experts("bf16"), jnp.zeros((3, 1), jnp.int32)
    call = functools.partial(moe, weights=jnp.ones((3, 1)), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="activations must be bfloat16, not float32"):
        call(rows(3).astype(jnp.float32), ids, gate_up=weights[0], down=weights[1])
    wide = [p._replace(values=p.values.astype(jnp.float32)) for p in weights]
    with pytest.raises(NotImplementedError, match="plain weights must be bfloat16, not float32"):
        call(rows(3), ids, gate_up=wide[0], down=weights[1])
    with pytest.raises(NotImplementedError, match="plain weights must be bfloat16, not float32"):
        call(rows(3), ids, gate_up=weights[0], down=wide[1])
