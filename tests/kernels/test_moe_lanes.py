"""Lane code of `mosaic_plan`, run on a CPU with numpy in place of MLIR (`lanes.Machine`), beside
its definition.

The interpreter does not run this code; a GPU runs nothing else.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import mosaic_plan, mosaic_route, mosaic_sort, paths
from pallas_kernels.moe.mosaic_layout import Own, Plan, Scratch
from pallas_kernels.moe.mosaic_plan import Results
from pallas_kernels.moe.worklist import make_worklist, most_items, own_items
from tests.kernels.lanes import Machine

KINDS = ("plain", "ties", "zeros", "infinite", "uneven")


def logits_of(R: int, E: int, kind: str, seed: int = 0) -> np.ndarray:
    """float32 [R, E]. "ties": few whole numbers; "zeros": of both signs; "infinite": also NaN;
    "uneven": few experts.
    """
    random = np.random.default_rng([R, E, seed])
    logits = random.normal(size=(R, E)).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "zeros":
        return np.where(logits > 0.5, logits, np.copysign(np.float32(0), logits))
    if kind == "infinite":
        strange = np.array([np.inf, -np.inf, np.nan, 1e-30, -1e-30, 3e38, -3e38], np.float32)
        return np.where(logits > 0.3, random.choice(strange, (R, E)), logits)
    if kind == "uneven":
        logits[:, :: max(1, E // 8)] += 20
    return logits


def plan_of(R: int, E: int, k: int, *, tokens: int, normalize: bool = True, shared: bool = False):
    return Plan(R, E, k, normalize, tokens, shared, interpreted=False)


def run(monkeypatch, plan: Plan, logits, bias=None, own: Own | None = None, *, backwards=False):
    """`plan_rows` of all blocks: weights, slots [k, R'], experts and num_items."""
    machine = Machine(monkeypatch, blocks=plan.blocks, backwards=backwards)
    items = most_items(plan.R, plan.E, plan.top_k, plan.tokens, plan.shared)
    made = mosaic_plan.results(plan, items)
    results = Results(*(machine.device.take(x.shape, x.dtype) for x in made))
    rows, columns = plan.load_shape
    padded = np.zeros((plan.blocks * plan.rows + rows, columns), np.float32)
    padded[: plan.R, : plan.E] = logits
    biases = []
    if bias is not None:
        biases = [machine.device.take((paths.padded_experts(plan.E),), np.float32)]
        biases[0][...] = np.pad(bias, (0, biases[0].shape[0] - plan.E))
    sources, scratches = [], []
    for block, memory in enumerate(machine.shared):
        sources.append(memory.take((rows, columns), np.float32))
        sources[-1][...] = padded[block * plan.rows :][:rows]
        words = lambda *shape, memory=memory: memory.take(shape)
        picks, Ep = plan.k8 * plan.rows, plan.Ep
        scratches.append(
            Scratch(
                logits_smem=None,
                total_smem=memory.take((64,), np.float32),
                keys_smem=words(picks),
                ids_smem=words(picks),
                masks_smem=words(Ep),
                counts_smem=words(plan.blocks, Ep),
                ends_smem=words(Ep),
                base_smem=words(Ep),
                barriers_smem=words(2),
            )
        )
    if not plan.normalize:
        whole = logits if bias is None else logits + bias
        totals = np.ones(padded.shape[0], np.float32)
        totals[: plan.R] = np.exp(whole - whole.max(1, keepdims=True)).sum(1)
        monkeypatch.setattr(mosaic_route, "load_parts", lambda source, *_: source)

        def sum_of_exps(_):
            block = machine.own.place[0]
            return np.resize(totals[block * plan.rows :], 64)

        monkeypatch.setattr(mosaic_route, "sum_of_exps", sum_of_exps)

    def program(block):
        mosaic_plan.prepare(plan, results, scratches[block])
        mosaic_plan.plan_rows(
            plan, block, sources[block], biases, own, items, results, [], scratches[block]
        )

    machine.run(program)
    return [np.asarray(ref.read()) for ref in results]


def wanted(plan: Plan, logits, bias=None, own: Own | None = None):
    logits = logits if bias is None else logits + bias
    finite = np.where(np.isnan(logits), np.inf, np.maximum(logits, np.finfo(np.float32).min))
    order = np.argsort(-np.where(finite == 0, 0, finite), axis=1, kind="stable")
    ids = order[:, : plan.top_k]
    chosen = np.take_along_axis(finite, ids, 1).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp(chosen - chosen[:, :1])
        total = np.exp(finite - chosen[:, :1]).sum(1, keepdims=True)
        weights = powers / (powers.sum(1, keepdims=True) if plan.normalize else total)
    work = make_worklist(jnp.asarray(ids.T, jnp.int32), plan.E, plan.tokens, plan.shared)
    if own is not None:
        work, weights = own_items(
            work, jnp.asarray(weights.T), jnp.int32(own.first), own.count, plan.tokens
        )
        weights = weights.T
    return np.asarray(weights).T, *map(np.asarray, (work.slots, work.experts, work.num_items))


def assert_same(plan: Plan, found, expected):
    weights, slots, experts, num_items = found
    count, R = int(expected[3][0]), plan.R
    assert (num_items == count).all()
    assert np.array_equal(slots[:, :R], expected[1])
    assert np.array_equal(experts[:count], expected[2][:count])
    assert ((experts >= 0) & (experts < plan.E)).all()
    np.testing.assert_allclose(weights[:, :R], expected[0], rtol=1e-5)
    if plan.blocks == 1:
        assert not weights[:, plan.rows :].any()
        assert not slots[:, plan.rows :].any()


CASES = [
    # R, E, k, tokens, shared
    (1, 128, 8, 8, True),
    (5, 32, 4, 8, True),
    (8, 128, 8, 8, True),
    (13, 96, 3, 8, False),
    (16, 128, 10, 16, True),
    (20, 33, 33, 16, False),
    (128, 32, 4, 24, False),
    (256, 64, 12, 64, False),
]


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize(("R", "E", "k", "tokens", "shared"), CASES)
def test_lanes_plan_as_defined(monkeypatch, R, E, k, tokens, shared):
    plan = plan_of(R, E, k, tokens=tokens, shared=shared)
    for i, kind in enumerate(KINDS):
        logits = logits_of(R, E, kind)
        found = run(monkeypatch, plan, logits, backwards=bool(i % 2))
        assert_same(plan, found, wanted(plan, logits))


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize(("R", "E", "k"), [(8, 128, 8), (12, 32, 4), (64, 96, 4), (130, 128, 8)])
@pytest.mark.parametrize("share", [0, 3])
def test_lanes_plan_a_share(monkeypatch, R, E, k, share):
    plan = plan_of(R, E, k, tokens=16)
    own = Own(share * E // 4, E // 4)
    bias = np.random.default_rng(1).normal(size=E).astype(np.float32)
    logits = logits_of(R, E, "plain")
    found = run(monkeypatch, plan, logits, bias, own, backwards=True)
    expected = wanted(plan, logits, bias, own)
    assert_same(plan, found, expected)
    assert ((found[2] >= 0) & (found[2] < own.count)).all()


@pytest.mark.sampled(2, slow=1)
@pytest.mark.parametrize("Ep", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("blocks", [1, 3])
def test_lanes_sort_in_many_blocks(monkeypatch, Ep, blocks):
    """The stages of `mosaic_route.place`: prefix sums, and more items than threads."""
    for seed, density in enumerate((0.3, 0.9, 0.02, 1)):
        random = np.random.default_rng([Ep, seed])
        tiles = random.integers(0, 4, Ep) * (random.random(Ep) < density)
        assert_sorts(Machine(monkeypatch, blocks=blocks, backwards=seed % 2 == 1), tiles)


def assert_sorts(machine: Machine, tiles: np.ndarray) -> None:
    Ep, blocks, chunks = len(tiles), len(machine.shared), 2 * (len(tiles) // 16)
    refs = [(memory.take((Ep,)), memory.take((Ep,))) for memory in machine.shared]
    experts, num_items = machine.device.take((32 * chunks,)), machine.device.take((64,))
    for tiles_ref, _ in refs:
        tiles_ref[...] = tiles.astype(np.int32)

    def program(block):
        tiles_ref, ends_ref = refs[block]
        of_block = block, blocks
        mosaic_sort.scan_items(Ep, tiles_ref, ends_ref, interpreted=False)
        mosaic_sort.store_count(ends_ref, num_items, block, interpreted=False)
        mosaic_sort.store_experts(Ep - 1, ends_ref, of_block, experts, None, interpreted=False)

    machine.run(program)
    ends = np.cumsum(tiles)
    assert (np.asarray(num_items.read()) == ends[-1]).all()
    for _, ends_ref in refs:
        assert np.array_equal(ends_ref.read(), ends)
    done = np.minimum((ends <= np.arange(32 * chunks)[:, None]).sum(1), Ep - 2)
    assert np.array_equal(experts.read(), done)
