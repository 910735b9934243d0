"""Attention in Mosaic's interpreter: results, and rows whose bits depend on no others."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import B200, H200
from pallas_kernels.verify_attention import mosaic_sm90, mosaic_sm100, reference
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.mosaic_plan import Splits

pytestmark = pytest.mark.sampled(1)

interpreted = pytest.mark.usefixtures("race_free")
on_each_chip = pytest.mark.parametrize(
    "chip", [mosaic_sm90, mosaic_sm100], ids=["hopper", "blackwell"]
)
DEVICES = {mosaic_sm90: H200, mosaic_sm100: B200}

# Weights (of a mean of values around 1) and results are rounded to bfloat16: 2^-9 each, and some.
CLOSE = dict(rtol=2**-8, atol=2**-8)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows at `starts`, scattered pages of `width`; a `block` sees what its last row sees."""

    starts: tuple[int, ...]
    T: int
    K: int
    G: int
    H: int
    Z: int
    width: int
    window: int | None = None
    sinks: bool = False
    fp8: bool = False
    block: bool = False

    def inputs(self):
        B, N = len(self.starts), self.K * self.G
        keys = jax.random.split(jax.random.key(0), 3)
        pages = (B * self.width + 1, self.Z, self.K, self.H)
        q = jax.random.normal(keys[0], (B, self.T, N, self.H), jnp.bfloat16)
        kept = jnp.float8_e4m3fn if self.fp8 else jnp.bfloat16
        k, v = (jax.random.normal(key, pages, jnp.bfloat16).astype(kept) for key in keys[1:])
        order = np.random.default_rng(0).permutation(B * self.width)
        table = jnp.asarray(1 + order.reshape(B, self.width), jnp.int32)
        rows = jnp.full(self.T, self.T - 1) if self.block else jnp.arange(self.T)
        positions = jnp.asarray(self.starts, jnp.int32)[:, None] + rows
        sinks = jnp.linspace(-1, 3, N).astype(jnp.bfloat16) if self.sinks else None
        return q, k, v, table, positions, sinks

    def defined(self, q, k, v, table, positions, sinks) -> jax.Array:
        """The definition in float32, of `inputs`."""
        exact = [x.astype(jnp.float32) for x in (q, k, v)]
        options = (self.H**-0.5, self.window, sinks, 1)
        return reference.attend(*exact, table, positions, *options)


def kernel(chip, case: Case, walks: int, split: int | Splits = 64, row_groups: int = 1):
    """The kernel with short splits: (q, k, v, table, positions, sinks) -> out."""
    launch = dispatch.resolve("verify_attention", "mosaic_gpu", chips=(90,))
    launch = launch._replace(device=DEVICES[chip])
    key_block = 64 if case.H <= 256 else 32
    splits = split if isinstance(split, Splits) else Splits(((0, split),))
    config = chip.TuningConfig(key_block, splits, 2, walks, row_groups)
    scale = case.H**-0.5

    def run(q, k, v, table, positions, sinks):
        return chip.verify_attention(
            q, k, v, table, positions, scale, case.window, sinks, launch, config
        )

    return run


def attend(
    chip, case: Case, q, k, v, table, positions, sinks, walks: int, split: int | Splits = 64
):
    """The result of `kernel`."""
    return exactly(kernel(chip, case, walks, split), q, k, v, table, positions, sinks)


def exactly(run, *inputs):
    """The result of a kernel, whose division is exact."""
    # On a CPU this pass replaces the division by a sum of weights by a product with its inverse,
    # where the sum is broadcast, as it is in one of the two kernels that divide. One result in
    # thousands is rounded apart.
    exact = {"xla_disable_hlo_passes": "algsimp"}
    return jax.jit(run, compiler_options=exact)(*inputs)


@pytest.mark.sampled(1, slow=2)
@interpreted
@on_each_chip
@pytest.mark.parametrize(
    "case",
    [
        Case((70, 5), T=2, K=1, G=8, H=64, Z=16, width=8),
        Case((126,), T=3, K=2, G=4, H=128, Z=32, width=5, sinks=True),
        Case((70,), T=2, K=1, G=7, H=128, Z=16, width=8),
        Case((195,), T=3, K=1, G=8, H=64, Z=16, width=8, window=70, sinks=True),
        Case((95,), T=3, K=1, G=2, H=256, Z=16, width=8),
        Case((95,), T=1, K=1, G=8, H=512, Z=64, width=2),
        Case((40,), T=70, K=1, G=2, H=64, Z=16, width=8),
        Case((70, 5), T=2, K=1, G=8, H=64, Z=16, width=8, fp8=True),
        Case((95,), T=3, K=1, G=2, H=256, Z=16, width=8, fp8=True),
        Case((70, 5), T=8, K=1, G=4, H=64, Z=16, width=8, block=True),
        Case((195,), T=8, K=1, G=4, H=64, Z=16, width=8, window=70, block=True),
    ],
    ids=[
        "two-sequences",
        "sinks",
        "seven-heads-a-group",
        "ring",
        "head-dim-256",
        "head-dim-512",
        "two-row-tiles",
        "fp8",
        "fp8-head-dim-256",
        "block",
        "block-in-a-ring",
    ],
)
def test_kernel_equals_the_definition_however_the_work_is_cut(chip, case):
    q, k, v, *rest = case.inputs()
    want = case.defined(q, k, v, *rest)
    alone = attend(chip, case, q, k, v, *rest, walks=1)
    np.testing.assert_allclose(alone.astype(jnp.float32), want, **CLOSE)
    shared = attend(chip, case, q, k, v, *rest, walks=2)
    np.testing.assert_array_equal(shared, alone)


GROWN = Splits(((0, 64), (128, 128), (256, 256)))


@pytest.mark.sampled(0, slow=2)
@interpreted
@on_each_chip
@pytest.mark.parametrize(
    "case",
    [
        Case((300, 5), T=2, K=1, G=8, H=64, Z=16, width=20),
        Case((397,), T=3, K=1, G=8, H=64, Z=16, width=20, window=270, sinks=True),
        Case((200,), T=1, K=1, G=2, H=256, Z=16, width=13, fp8=True),
        Case((180,), T=1, K=1, G=8, H=512, Z=64, width=3),
    ],
    ids=["two-sequences", "ring", "fp8-head-dim-256", "head-dim-512"],
)
def test_splits_that_grow_give_a_row_the_same_bits_however_the_work_is_cut(chip, case):
    q, k, v, table, positions, sinks = case.inputs()
    want = case.defined(q, k, v, table, positions, sinks)
    found = lambda walks: attend(chip, case, q, k, v, table, positions, sinks, walks, GROWN)
    alone = found(1)
    np.testing.assert_allclose(alone.astype(jnp.float32), want, **CLOSE)
    for walks in (2, 4):
        np.testing.assert_array_equal(found(walks), alone)
    row = q[:1, -1:], k, v, table[:1], positions[:1, -1:], sinks  # without its company
    np.testing.assert_array_equal(attend(chip, case, *row, 3, GROWN), alone[:1, -1:])


@pytest.mark.sampled(1)
@interpreted
@on_each_chip
def test_an_odd_group_of_narrow_heads_is_one_walk(chip):
    """The merging kernel could not store it; Qwen2.5-0.5B has such groups."""
    case = Case((70,), T=2, K=1, G=7, H=64, Z=16, width=8)
    chosen = chip.choose_config((1, 8, 14, 64), 2, 2**17, None, DEVICES[chip])
    assert chosen.walks == 1
    q, k, v, *rest = case.inputs()
    want = case.defined(q, k, v, *rest)
    got = attend(chip, case, q, k, v, *rest, walks=1).astype(jnp.float32)
    np.testing.assert_allclose(got, want, **CLOSE)


@on_each_chip
@pytest.mark.parametrize(("H", "G", "refused"), [(64, 7, True), (64, 6, False), (128, 7, False)])
def test_walks_whose_splits_cannot_be_merged_are_refused(chip, H, G, refused):
    """128 columns at a time: of head dim 64 two heads, which must be of one query."""
    case = Case((70,), T=2, K=1, G=G, H=H, Z=16, width=8)
    run = lambda: jax.eval_shape(kernel(chip, case, walks=2), *case.inputs())
    if not refused:
        assert run().shape == (1, 2, G, H)
        return
    with pytest.raises(
        ValueError, match=r"walks=2 must be 1 for a head dim of 64 and 7 query heads"
    ):
        run()


@pytest.mark.sampled(0, slow=1)
@interpreted
@on_each_chip
@pytest.mark.parametrize(
    "case",
    [
        Case((70, 5), T=2, K=1, G=8, H=64, Z=16, width=8),
        Case((195,), T=3, K=1, G=8, H=64, Z=16, width=8, window=70, sinks=True),
        Case((70, 5), T=2, K=1, G=8, H=64, Z=16, width=8, fp8=True),
    ],
    ids=["two-sequences", "ring", "fp8"],
)
def test_keys_of_nan_that_a_row_must_not_see_change_no_bit(chip, case):
    """What a failed request left in pages, a rejected draft ahead, the dummy page."""
    q, k, v, table, positions, sinks = case.inputs()
    order = np.asarray(table)
    stale = np.ones(k.shape[:2], bool)  # all but what the last row of a sequence sees
    for b, last in enumerate(np.asarray(positions)[:, -1]):
        first = 0 if case.window is None else max(0, positions[b, 0] - case.window + 1)
        for p in range(first, last + 1):
            stale[order[b, p // case.Z % case.width], p % case.Z] = False
    marked = jnp.where(jnp.asarray(stale)[..., None, None], jnp.asarray(jnp.nan, k.dtype), k)
    args = (v, table, positions, sinks)
    for walks in (1, 2):
        want = attend(chip, case, q, k, *args, walks=walks)
        np.testing.assert_array_equal(attend(chip, case, q, marked, *args, walks=walks), want)
    # The last row's own key: rows before it do not see it, and it becomes NaN.
    p = int(positions[0, -1])
    own = order[0, p // case.Z % case.width], p % case.Z
    out = attend(chip, case, q, marked.at[own].set(jnp.nan), *args, walks=1)
    np.testing.assert_array_equal(out[0, :-1], want[0, :-1])
    assert np.isnan(np.asarray(out[0, -1], np.float32)).all()
    np.testing.assert_array_equal(out[1:], want[1:])


@pytest.mark.sampled(1, slow=1)
@interpreted
@on_each_chip
@pytest.mark.parametrize(("window", "fp8"), [(None, False), (70, True)])
def test_a_row_does_not_depend_on_its_company(chip, window, fp8):
    sizes = dict(T=3, K=1, G=4, H=64, Z=16, width=16, sinks=True)
    case = Case((150, 20), window=window, fp8=fp8, **sizes)
    q, k, v, table, positions, sinks = case.inputs()
    together = attend(chip, case, q, k, v, table, positions, sinks, walks=1)
    row = q[:1, 2:], k, v, table[:1], positions[:1, 2:], sinks
    np.testing.assert_array_equal(attend(chip, case, *row, walks=1), together[:1, 2:])
    np.testing.assert_array_equal(attend(chip, case, *row, walks=3), together[:1, 2:])


@pytest.mark.sampled(1)
@interpreted
@on_each_chip
def test_a_row_does_not_depend_on_the_size_of_its_ring(chip):
    case = Case((200,), T=1, K=1, G=8, H=64, Z=16, width=6, window=50)
    q, k, v, table, positions, sinks = case.inputs()
    want = attend(chip, case, q, k, v, table, positions, sinks, walks=1)
    column = np.arange(200 // 16 - 5, 200 // 16 + 1)  # of the pages that the ring of six holds
    wider = np.zeros((1, 9), np.int32)
    wider[:, column % 9] = np.asarray(table)[:, column % 6]
    out = attend(chip, case, q, k, v, jnp.asarray(wider), positions, sinks, walks=1)
    np.testing.assert_array_equal(out, want)


@pytest.mark.sampled(0, slow=1)
@interpreted
@on_each_chip
def test_padding_sequences_and_positions_past_the_table_are_harmless(chip):
    case = Case((30, 0, 31), T=2, K=1, G=8, H=64, Z=16, width=2)
    q, k, v, table, positions, sinks = case.inputs()
    table = table.at[1].set(0)
    out = attend(chip, case, q, k, v, table, positions, sinks, walks=1)
    assert np.isfinite(out.astype(jnp.float32)).all()
    alone = attend(chip, case, q[:1], k, v, table[:1], positions[:1], sinks, walks=1)
    np.testing.assert_array_equal(out[:1], alone)


@interpreted
def test_the_api_runs_the_kernel_and_refuses_what_it_cannot_take():
    case = Case((20,), T=1, K=1, G=8, H=64, Z=16, width=2)
    q, k, v, table, positions, _ = case.inputs()
    options = dict(page_table=table, positions=positions, scale=0.125, implementation="mosaic_gpu")
    want = reference.attend(q, k, v, table, positions, 0.125, None, None, 2)
    out = verify_attention(q, k, v, **options)
    np.testing.assert_allclose(out.astype(jnp.float32), want.astype(jnp.float32), **CLOSE)
    wrong = [
        (q.astype(jnp.float32), k, v, "bfloat16"),
        (q[..., :48], k[..., :48], v[..., :48], "head dim of 48"),
        (q, k[:, :12], v[:, :12], "pages of 12"),
        (jnp.tile(q, (1, 1, 9, 1)), k, v, "72 query heads"),
    ]
    for *args, message in wrong:
        with pytest.raises(NotImplementedError, match=message):
            verify_attention(*args, **options)


LAYERS = (
    *((32, 4, 128, None), (32, 8, 128, None), (14, 2, 64, None), (28, 4, 128, None)),
    *((64, 8, 64, None), (64, 8, 64, 128), (32, 16, 256, 1024), (32, 4, 512, None)),
)
"""Query heads, key heads, head dim and window of Qwen3-30B, Llama-3.1-8B, Qwen2.5, GPT-OSS and
Gemma-4-31B."""


@on_each_chip
def test_tuning_leaves_the_arithmetic_alone(chip):
    """`key_block` and `splits` follow from the head dim and the window."""
    seen = {}
    calls = itertools.product(LAYERS, (1, 8, 64), (1, 8, 14, 512), (512, 4096, 65536))
    for (N, K, H, window), B, T, length in calls:
        config = chip.choose_config((B, T, N, H), K, length, window, DEVICES[chip])
        arithmetic = (config.key_block, config.splits)
        assert seen.setdefault((H, window is None), arithmetic) == arithmetic
        assert config.splits.steps[0][1] % config.key_block == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("columns", [64, 128])
@on_each_chip
def test_the_registers_of_a_thread_take_turns_through_its_rows(chip, columns):
    """`store_split` relies on it; the interpreter does not run its inline code."""
    layout, shape = chip.TILE.layout, (chip.TILE.rows, columns)

    def rows_of_registers(layout, shape: tuple[int, ...]) -> list[int]:
        """The row of each register of thread 0."""
        layout = layout.to_mgpu()
        strides = tuple(math.prod(shape[i:]) for i in range(1, len(shape) + 1))
        places = [
            np.dot(index, layout.tiling.tile_strides(strides))
            for index in np.ndindex(layout.registers_shape(shape))
        ]
        return [int(place) // strides[0] for place in places]

    rows = rows_of_registers(layout.reduce(1), shape[:1])
    num_registers = columns * chip.TILE.rows // 128 // 2  # two numbers in each, 128 threads
    assert rows_of_registers(layout, shape) == rows * (num_registers // len(rows))
