"""Tiling of the attention kernels of all chips: row tiles, blocks and splits of keys.

A thread block owns one row tile of one kv head, or `row_groups` consecutive ones
(`mosaic_prefill`): row r of a tile is query r // G, head r % G of the group. Keys come in blocks of
`key_block` keys, and blocks form splits (`Splits`), both at absolute positions. Each split starts a
new softmax (best, total, out): the row maximum, the sum of weights, and the weighted sum of values.
Splits are merged one by one in ascending order. `walks` affects speed only:

  walks = 1   one thread block visits all splits and merges them in registers;
  walks > 1   thread blocks share the splits (`mosaic_walk`) and store (best, total, out) of each; a
              second kernel merges them with the same formula in the same order.

So the bits of a row depend neither on other rows nor on the tiling. A masked key contributes
exactly 0, and a fully masked block or split leaves (best, total, out) unchanged.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

RAW = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
"""Shared-memory layout of e4m3 key blocks."""


class Tile(NamedTuple):
    """Row tile of a thread block on one chip.

    Attributes:
      rows: M of the MMA.
      groups: maximum number of warpgroups; each computes 128 output columns.
      layout: register layout of a [rows, n] array.
      row_groups: maximum of `TuningConfig.row_groups`.
    """

    rows: int
    groups: int
    layout: Any
    row_groups: int = 1


@dataclasses.dataclass(frozen=True)
class Splits:
    """Splits of a sequence, numbered 0, 1, ... in ascending order; places are keys or key blocks.

    A split is as long as its first place says, so it is the same for every row, tile and length of
    a sequence.

    Attributes:
      steps: (first place, size of the splits from there on), in ascending order. A size divides the
        next size and the next first place.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self):
        if not self.steps or self.steps[0][0]:
            raise ValueError(f"{self.steps} must begin at place 0")
        for (first, size), (next_first, next_size) in itertools.pairwise(self.steps):
            if not first < next_first or not size < next_size:
                raise ValueError(f"{self.steps} must ascend")
            if next_first % next_size or next_first % size or next_size % size:
                raise ValueError(
                    f"{next_size=} must be a multiple of {size} and divide {next_first}"
                )

    @property
    def grow(self) -> bool:
        return len(self.steps) > 1

    def in_blocks(self, key_block: int) -> "Splits":
        """The same splits, for places in key blocks instead of keys."""
        return Splits(tuple((first // key_block, size // key_block) for first, size in self.steps))

    def split_of(self, place: Any) -> Any:
        """The split of a place, both non-negative: Python numbers or traced int32."""
        # Sizes grow, so the number of a split is a concave function of the place: the least of its
        # lines.
        found = [_floor(place, size) + before for size, before in self._lines]
        return functools.reduce(min if isinstance(place, int) else jnp.minimum, found)

    def first_of(self, split: Any) -> Any:
        """The first place of a split, as `split_of`."""
        found = [(split - before) * size for size, before in self._lines]
        return functools.reduce(max if isinstance(split, int) else jnp.maximum, found)

    @property
    def _lines(self) -> list[tuple[int, int]]:
        """(size, before) of each step: place p of the step is in split p // size + before."""
        lines, before = [], 0
        for i, (first, size) in enumerate(self.steps):
            if i:
                before += first // self.steps[i - 1][1] - first // size
            lines.append((size, before))
        return lines


def _floor(place: Any, size: int) -> Any:
    """place // size; lax.div of traced numbers, which are not negative."""
    return place // size if isinstance(place, int) else lax.div(place, jnp.int32(size))


UNIFORM = Splits(((0, 256),))
GROWING = Splits(((0, 256), (1024, 512), (16384, 1024), (65536, 2048)))
"""Splits of layers without a window. Long contexts have fewer results of splits to store and merge:
34 instead of 64 for 16,384 keys, 114 instead of 512 for 131,072. A walk owns whole splits, so with
longer ones a single sequence would have too few walks. Another choice changes the bits of all
calls."""


def splits_of(window: int | None) -> Splits:
    """Splits of a layer, the same in all of its calls. A window has a few splits of 256 keys; in
    longer ones it would be one walk."""
    return GROWING if window is None else UNIFORM


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tile sizes; only `key_block` and `splits` affect the result's bits.

    Attributes:
      key_block: keys of one MMA; depends on the head dim only.
      splits: keys of one softmax, see `splits_of`; places are keys.
      stages: pipeline stages (key blocks in flight).
      walks: thread blocks that share the splits of one row tile.
      row_groups: row tiles of a thread block; several share its key blocks (`mosaic_prefill`).
      raw_stages: pipeline stages of e4m3 blocks besides `stages`, which are bfloat16, with several
        row groups.
    """

    key_block: int
    splits: Splits
    stages: int
    walks: int
    row_groups: int = 1
    raw_stages: int = 2


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Static facts of one call."""

    B: int  # sequences
    T: int  # queries per sequence
    K: int  # kv heads
    G: int  # query heads per kv head
    H: int  # head dim
    Z: int  # tokens per page
    W: int  # pages per sequence
    scale: float
    window: int | None
    has_sinks: bool
    fp8: bool
    config: TuningConfig
    tile: Tile

    @property
    def N(self) -> int:
        return self.K * self.G

    @property
    def tile_queries(self) -> int:
        """Queries in one row tile."""
        return min(self.T, self.tile.rows // self.G)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.T, self.tile_queries)

    @property
    def tile_rows(self) -> int:
        return self.tile_queries * self.G

    @property
    def columns(self) -> int:
        """Output columns per warpgroup."""
        return min(self.H, 128)

    @property
    def groups(self) -> int:
        """Warpgroups per thread block: each computes all scores and its own output columns."""
        return min(self.tile.groups, self.H // self.columns)

    @property
    def shares(self) -> int:
        """Thread blocks that divide the output columns of one row tile."""
        return self.H // (self.columns * self.groups)

    @property
    def merges_inside(self) -> bool:
        return self.config.walks == 1

    @functools.cached_property
    def splits(self) -> Splits:
        """Splits; places are key blocks."""
        return self.config.splits.in_blocks(self.config.key_block)

    @property
    def copy_keys(self) -> int:
        """Keys per TMA copy: one page, or a key block if pages are larger."""
        return min(self.Z, self.config.key_block)

    @property
    def copies(self) -> int:
        return self.config.key_block // self.copy_keys

    @property
    def v_tiling(self) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """Shared-memory layout of V; an MMA over 32 keys needs a 64-byte swizzle."""
        width = min(64, self.config.key_block)
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)

    def slots(self, width: tuple[int, ...], transforms) -> list[Any]:
        """Slots of key blocks [stages, *, key_block, width]; for e4m3 pages also one bfloat16
        buffer."""
        *leading, width = width
        shape = (*leading, self.config.key_block, width)
        wide = plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
        slots = (self.config.stages, *shape)
        if not self.fp8:
            return [plgpu.SMEM(slots, jnp.bfloat16, transforms=transforms)]
        return [plgpu.SMEM(slots, jnp.float8_e4m3fn, transforms=RAW), wide]

    @property
    def aligned(self) -> bool:
        """Whether queries and results pass through swizzled tiles, of which the G rows fill whole
        ones (8)."""
        return self.G % 8 == 0

    @property
    def max_splits(self) -> int:
        return max_splits(self.config.splits, self.W * self.Z, self.window, self.tile_queries)


def max_splits(splits: Splits, table_size: int, window: int | None, queries: int) -> int:
    """Maximum number of splits that the rows of a tile of `queries` queries see, in a table of
    `table_size` keys."""
    if window is None:
        return splits.split_of(table_size - 1) + 1
    # Most splits are seen from a first key that is the last one of its split. After the last step
    # they are equal, so one split of that size stands for all.
    last_step = splits.split_of(splits.steps[-1][0])
    firsts = (splits.first_of(split + 1) - 1 for split in range(last_step + 1))
    seen = window + queries - 1
    return max(splits.split_of(key + seen - 1) - splits.split_of(key) for key in firsts) + 1


def cut(splits: Splits, first: Any, end: Any, walks: int, index: Any) -> Any:
    """First split of walk `index` if `walks` walks share places `first` to `end - 1` in consecutive
    parts.

    A walk has the splits whose last place lies in its part of the places. So it has fewer places
    than its part and its first split, the shortest, together.
    """
    return splits.split_of(first + _floor((end - first) * index, walks))


def longest_walk(splits: Splits, keys: int, walks: int) -> int:
    """Keys of the longest of `walks` walks over `keys` keys from key 0 on."""
    if not splits.grow:
        return min(keys, pl.cdiv(splits.split_of(keys - 1) + 1, walks) * splits.steps[0][1])
    firsts = [splits.first_of(cut(splits, 0, keys, walks, i)) for i in range(walks)]
    return max(end - first for first, end in itertools.pairwise([*firsts, keys]))


_START = 256
"""Keys that a thread block could visit in the time that it takes to start, about."""


def choose_walks(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    tile: Tile,
    room: int,
    splits: Splits,
) -> int:
    """`walks` for q of `shape` [B, T, N, H]; `room` is the number of resident thread blocks of the
    chip."""
    B, T, N, H = shape
    G = N // kv_heads
    queries = min(T, tile.rows // G)
    blocks = B * kv_heads * pl.cdiv(T, queries)
    most = max_splits(splits, table_size, window, queries)
    # The merge is a second kernel: it pays off only with many splits and idle SMs.
    if most <= 2 or 8 * blocks >= 3 * room or not _can_store_splits(G, H):
        return 1
    # Blocks run in waves of `room`. A wave takes as long as its longest walk and the start of one.
    keys = table_size if window is None else splits.first_of(most)
    cost = lambda walks: (
        pl.cdiv(blocks * walks, room) * (longest_walk(splits, keys, walks) + _START)
    )
    return min(range(1, most + 1), key=cost)


def _can_store_splits(group: int, head_dim: int) -> bool:
    """The merge kernel handles 128 columns at a time: with H = 64, two heads of one query."""
    return head_dim % 128 == 0 or group % (128 // head_dim) == 0


def make_plan(
    q,
    k_pages,
    table,
    tile: Tile,
    config: TuningConfig,
    *,
    scale: float,
    window: int | None,
    has_sinks: bool,
) -> AttentionPlan:
    """AttentionPlan of a call from the shapes.

    Raises:
      ValueError: `config` has several walks, whose splits the merge kernel cannot read, or several
        row groups where a thread block cannot have them.
    """
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    fp8 = k_pages.dtype == jnp.float8_e4m3fn
    if config.walks > 1 and not _can_store_splits(N // K, H):
        raise ValueError(
            f"{config.walks=} must be 1 for a head dim of {H} and {N // K} query heads per kv "
            f"head: the merge kernel takes {128 // H} heads of one query at a time"
        )
    if config.row_groups > 1:
        wrong = {
            f"on this chip, which has at most {tile.row_groups}": config.row_groups
            > tile.row_groups,
            f"with {config.walks} walks": config.walks > 1,
            f"with a head dim of {H}": H > 128,
        }
        if said := [why for why, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(f"{config.row_groups=} must be 1 {' and '.join(said)}")
    return AttentionPlan(
        B=B,
        T=T,
        K=K,
        G=N // K,
        H=H,
        Z=Z,
        W=table.shape[1],
        scale=scale,
        window=window,
        has_sinks=has_sinks,
        fp8=fp8,
        config=config,
        tile=tile,
    )


def result_type(plan: AttentionPlan):
    """Result of the walk kernel: rows, or (parts, stats) of each split; stats are (best, total).

    Parts have the `tile_rows` rows of a tile that exist, stats all rows of the MMA.
    """
    if plan.merges_inside:
        return jax.ShapeDtypeStruct((plan.B, plan.T, plan.K, plan.G, plan.H), jnp.bfloat16)
    where = (plan.B, plan.K, plan.tiles, plan.max_splits)
    return (
        jax.ShapeDtypeStruct((*where, plan.tile_rows, plan.H), jnp.float32),
        jax.ShapeDtypeStruct((*where, 2, plan.tile.rows), jnp.float32),
    )
