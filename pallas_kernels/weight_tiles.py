"""Tiles of weights inside a kernel: how each format is fetched, unpacked and multiplied.

Weights are the M operand of the product (64 rows on Hopper, 128 on Blackwell), tokens the N operand
("swap-AB"): with few tokens no part of the tensor core is wasted on padding. A weight is unpacked to bfloat16
in registers, so it streams from memory at its own width and the product is that of bfloat16 activations,
exactly rounded factors and float32 sums. (Hopper's FP8 product keeps fewer bits, and activations would have
to be quantised.)

Every step of columns the partial product is multiplied by the block's scale and added to a float32 total.
(Mxfp4's scales are in the unpacked weights already, see `weight_tiles_mxfp4`.)
A sum over K therefore depends on K and the number of chunks alone, never on the rows in the call.

With many tokens a block is bound by what it reads from the level 2 cache. So it may be several warpgroups
("groups"), each with a tile of the weight of its own, that share the tiles of x: see `Ring`.

Here is what chips share. What they multiply with is a `Format` of each: `weight_tiles_sm90`,
`weight_tiles_sm100`; `weight_chips` has the choice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, weight_tiles_mxfp4
from pallas_kernels.device import Device

STEP = 128
"""Columns (of the sum) of one tile; `formats.BLOCK`, so that a tile has one fp8 scale. Not of mxfp4."""

TOTAL = weight_tiles_mxfp4.TOTAL
"""What products with mxfp4 tiles are to be multiplied by."""

_SWIZZLE = 128  # bytes


def swizzled(dtype: jnp.dtype) -> tuple:
    """Transforms of a shared-memory tile that tensor cores and TMA both read without conflicts."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))


@dataclass(frozen=True)
class Format:
    """How one weight is stored, as a kernel needs to know it.

    Attributes:
      kind: see `formats`.
      per_row: fp8 only: one scale a row ([N, 1]), which multiplies the total.
      rows: of the weight in one tile.
      layout: of products [rows, tokens] in registers, and `transposed`, in which they are written.
    """

    kind: formats.Kind
    per_row: bool = False
    rows: ClassVar[int]
    layout: ClassVar[plgpu.Layout]
    transposed: ClassVar[plgpu.Layout]

    @classmethod
    def of(cls, values: jax.Array, scale: jax.Array | None) -> Self:
        kind = formats.kind(values, scale)
        return cls(kind, per_row=kind == "fp8" and scale.shape[-2] == values.shape[-2])

    @property
    def in_blocks(self) -> bool:
        """Whether each tile has a scale of its own, which multiplies the tile's product."""
        return self.kind == "fp8" and not self.per_row

    @property
    def dtype(self) -> jnp.dtype:
        kinds = dict(plain=jnp.bfloat16, fp8=jnp.float8_e4m3fn, mxfp4=jnp.uint8)
        return jnp.dtype(kinds[self.kind])

    @property
    def step(self) -> int:
        """Columns (of the sum) of one tile."""
        return weight_tiles_mxfp4.STEP if self.kind == "mxfp4" else STEP

    @property
    def width(self) -> int:
        """Stored values of a tile's row."""
        return self.step // 2 if self.kind == "mxfp4" else self.step

    @property
    def unpacked(self) -> bool:
        """Whether threads read the tiles, rather than tensor cores."""
        return self.kind != "plain"

    @property
    def staged(self) -> bool:
        """Whether scales are fetched to shared memory, those of all columns before the first step."""
        return self.kind == "mxfp4"

    def groups(self, wanted: int) -> int:
        """Warpgroups of a block, where `wanted` would be welcome."""
        return 1

    def pieces(self, tokens: int, groups: int) -> int:
        """Into how many products a tile of tokens is cut where registers are few."""
        return 1

    def stages(self, wanted: int, num_steps: int, most: int) -> int:
        """Steps in flight, at least two: as many bytes as in `wanted` steps of 64 rows of the weight."""
        return min(max(2, wanted * 64 // self.rows), num_steps, most)

    def most_stages(
        self, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int, device: Device
    ) -> int:
        """As many as a block's shared memory has room for; other arguments as of `scratch`."""
        weights, scales = self.width * self.dtype.itemsize, K // formats.GROUP * self.staged
        stored = _stored(tokens, groups) * jnp.dtype(out_dtype).itemsize
        rest = groups * self.rows * (parts * scales + stored) + 2048  # barriers; tiles are aligned
        slot = groups * parts * self.rows * weights + tokens * self.step * 2
        return (device.smem_bytes - rest) // slot

    def scratch(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int = 1
    ) -> dict[str, Any]:
        """Memory of a block: what `Ring` takes, scales if they are staged, and out_s for the result.

        Of several warpgroups that share x each has its own out_s, scales and slots for weights, one group's
        after the other's. What a chip has beside these is for its `add_products`.
        """
        transforms = swizzled(self.dtype)
        if self.kind == "mxfp4":  # K / 2 need not be a multiple of a tile's width
            transforms = transforms[1:]
        shared = groups > 1
        out = (_stored(tokens, groups), self.rows)
        found = dict(
            out_s=plgpu.SMEM((groups, *out) if shared else out, out_dtype),
            w_s=plgpu.SMEM(
                (groups * stages, parts, self.rows, self.width), self.dtype, transforms=transforms
            ),
            x_s=plgpu.SMEM(
                (stages, tokens, self.step), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            ready=plgpu.Barrier(num_arrivals=parts + (not shared), num_barriers=groups * stages),
        )
        if shared:
            found["x_ready"] = plgpu.Barrier(num_barriers=stages)
            found["x_free"] = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
        if self.staged:
            found["scale_s"] = plgpu.SMEM(
                (groups * parts, self.rows * (K // formats.GROUP)), jnp.uint8
            )
            found["scales_ready"] = plgpu.Barrier(num_arrivals=parts, num_barriers=groups)
        return found

    def kernel_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """The scale as kernels take it; nothing is copied for shapes that models have."""
        if self.staged:
            return scale.reshape(-1)
        return self.pad_rows(scale, -2) if self.per_row else scale

    def arrange(self, x: jax.Array) -> jax.Array:
        """Activations [.., K] with columns in the order in which `products` takes them."""
        return weight_tiles_mxfp4.arrange(x) if self.kind == "mxfp4" else x

    def add_products(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        tiles: Sequence[Any],
        x: Any,
        refill: Callable,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
        **memory: Any,
    ) -> list[jax.Array]:
        """Totals, float32 [rows, tokens], plus each tile [rows, step] times x [tokens, step].

        For each tile there are as many totals as `pieces`, with the next tokens in each. Tiles and x are in
        shared memory, x arranged; `refill()` is called when they are not needed any more.
        Factors multiply products where tiles have scales: those of fp8 blocks, or `TOTAL` for mxfp4.
        Of mxfp4 `scales` are those of each tile's rows, [rows * K / 32] in shared memory, and the tiles are
        number `step` along K. `memory` is what `scratch` asked for beside the common parts.
        """
        raise NotImplementedError

    def add(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        products: Iterable[jax.Array],
    ) -> list[jax.Array]:
        """For `add_products`: one product after the other, as they come."""
        scaled = self.in_blocks or self.staged
        return [
            total + (product * factor if scaled else product)
            for total, product, factor in zip(totals, products, factors, strict=True)
        ]

    def zeros(self, parts: int, tokens: int, groups: int) -> list[jax.Array]:
        """Totals of `parts` tiles as `add_products` takes them, in the products' layout."""
        pieces = self.pieces(tokens, groups)
        zeros = jnp.zeros((self.rows, tokens // pieces), jnp.float32)
        return [plgpu.layout_cast(zeros, self.layout)] * (parts * pieces)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """One number a weight row, as `load_rows` needs it."""
        raise NotImplementedError

    def load_rows(self, source: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Numbers of a tile's rows, which `source` [N] in device memory has from `first` on.

        As float32 [rows, tokens]; of rows past N they may be anything.
        """
        raise NotImplementedError

    def store_tokens_first(
        self,
        out: Any,
        buffer: Any,
        tiles: Sequence[jax.Array],
        *,
        arranged: bool = False,
        interpret: Any = None,
    ) -> None:
        """Writes tiles [rows, tokens], the next tokens in each, to `out` [tokens of all, rows].

        That is in device memory, and what lies outside of its array is not written. `buffer` is shared
        memory of as many rows and out's dtype. With `arranged` the rows are in the order in which a
        product with mxfp4 weights takes them as columns.
        """
        size = buffer.shape[0]
        parts = [_columns(tile, i, size) for tile in tiles for i in range(tile.shape[1] // size)]
        for i, tile in enumerate(parts):
            if arranged:
                weight_tiles_mxfp4.store_arranged(buffer, tile, self.layout, interpret)
            else:
                buffer.T[...] = plgpu.layout_cast(tile.astype(out.dtype), self.transposed)
            plgpu.commit_smem()
            here = out if len(parts) == 1 else out.at[pl.ds(i * size, size)]
            plgpu.copy_smem_to_gmem(buffer, here)
            plgpu.wait_smem_to_gmem(0)


def _stored(tokens: int, groups: int) -> int:
    """Of a tile of tokens, how many lie in shared memory at once on their way out."""
    return min(tokens, 64, 128 // groups)


def _columns(tile: jax.Array, i: int, size: int) -> jax.Array:
    return tile if tile.shape[1] == size else tile[:, i * size : (i + 1) * size]


def fetch_tile(source: Any, tile: Any, ready: Any) -> None:
    """Starts copying `source` into shared memory; what lies outside of its array becomes zeros."""
    plgpu.copy_gmem_to_smem(source, tile, ready, oob_mode=plgpu.OOBFillMode.ZEROS)


def fetch_scales(source: Any, row: Any, rows: int, scales: Any, ready: Any) -> None:
    """Starts copying mxfp4 scales of a tile's rows, from the given one on, into shared memory.

    As contiguous bytes: for a tensor copy each row would have to be a multiple of 16 bytes. What lies
    past the array is left as it is.

    Args:
      source: device memory, uint8 [rows of all weights * K / 32].
      scales: [rows * K / 32].
    """
    size = scales.shape[0]
    here = source.at[pl.ds(row * (size // rows), size)]
    plgpu.copy_gmem_to_smem(here, scales, ready, oob_mode=plgpu.OOBFillMode.UNDEFINED)


@dataclass(frozen=True)
class Ring:
    """The slots that a block's tiles are fetched to, `stages` steps before they are multiplied.

    Each of several warpgroups fetches its own tiles of the weight, and as soon as it has multiplied one it
    fetches another to the slot. Tiles of x are for all of them: the first warpgroup fetches them, a step after it
    has multiplied the one before and when all others have. So it is at most one step ahead of any other.

    Attributes:
      fetch_weights, fetch_x: start copying what belongs to a step; take the step, where to, and a barrier.
      last: the number of steps.
      others: from `Format.scratch`.
    """

    form: Format
    groups: int
    stages: int
    last: int
    fetch_weights: Callable
    fetch_x: Callable
    w_s: Any
    x_s: Any
    ready: Any
    x_ready: Any = None
    x_free: Any = None

    def start(self) -> None:
        """Fetches the first steps."""
        for i in range(self.stages):
            step = jnp.int32(i)  # a Python number must not lie outside of the array
            self._fetch(step, i)
            if self.groups > 1:
                pl.when(group_of(self.groups) == 0)(
                    lambda step=step, i=i: self.fetch_x(step, self.x_s.at[i], self.x_ready.at[i])
                )

    def wait(self, slot: Any) -> tuple[Any, Any]:
        """Tiles of the weight [parts, rows, width] and x [tokens, step], which have arrived in a slot."""
        mine = self._mine(slot)
        plgpu.barrier_wait(self.ready.at[mine])
        if self.groups > 1:
            plgpu.barrier_wait(self.x_ready.at[slot])
        return self.w_s.at[mine], self.x_s.at[slot]

    def each_step(self, first: Any, count: Any, visit: Callable, carry: Any) -> Any:
        """Runs `carry = visit(step, slot, refill, carry)` for `count` steps from `first` on.

        `slot` is where a step's tiles lie; `visit` calls `wait(slot)`, and `refill()` after their last use.
        """

        def body(i, carry):
            i = first + i
            slot = lax.rem(i, self.stages)
            return visit(i, slot, lambda: self._refill(i, slot), carry)

        return lax.fori_loop(0, count, body, carry)

    def _refill(self, step: Any, slot: Any) -> None:
        @pl.when(step + self.stages < self.last)
        def _():
            # Orders threads' own reads before the copy that overwrites; tensor cores' need no fence.
            if self.form.unpacked:
                plgpu.commit_smem()
            if self.groups > 1:
                plgpu.barrier_arrive(self.x_free.at[slot])
            self._fetch(step + self.stages, slot)

        if self.groups > 1:
            # Not x of this step, for which the first warpgroup would wait until the others are as far:
            # then all would unpack at once, and after that all multiply at once.
            late = 1 if self.stages > 2 else 0
            done = step - late
            there = slot if not late else lax.rem(slot + self.stages - late, self.stages)

            @pl.when((done >= 0) & (done + self.stages < self.last) & (group_of(self.groups) == 0))
            def _():
                plgpu.barrier_wait(self.x_free.at[there])
                self.fetch_x(done + self.stages, self.x_s.at[there], self.x_ready.at[there])

    def _fetch(self, step: Any, slot: Any) -> None:
        mine = self._mine(slot)
        self.fetch_weights(step, self.w_s.at[mine], self.ready.at[mine])
        if self.groups == 1:
            self.fetch_x(step, self.x_s.at[slot], self.ready.at[slot])

    def _mine(self, slot: Any) -> Any:
        return slot if self.groups == 1 else group_of(self.groups) * self.stages + slot


def group_of(groups: int) -> Any:
    """Which of a block's warpgroups this is."""
    return lax.axis_index("group") if groups > 1 else 0


def of_group(ref: Any, groups: int) -> Any:
    """This warpgroup's part of what a block has for each."""
    return ref if groups == 1 else ref.at[group_of(groups)]


def first_rows(form: Format, groups: int, tile: Any, N: int) -> tuple[Any, Any]:
    """Where a warpgroup's tile of a weight [N, K] begins, in block `tile` of them: to read, and to store.

    A warpgroup past the end reads what the last one before it reads, and shall store nothing.
    """
    row = (tile if groups == 1 else tile * groups + group_of(groups)) * form.rows
    if groups == 1 or N % (groups * form.rows) == 0:
        return row, row
    return jnp.minimum(row, (pl.cdiv(N, form.rows) - 1) * form.rows), row


def launch_options(groups: int) -> dict[str, Any]:
    """Of `plgpu.kernel`, for blocks of several warpgroups."""
    if groups == 1:
        return {}
    # Without scratch memory, which warpgroups would share: a reduction in it would be a race.
    no_scratch = plgpu.CompilerParams(reduction_scratch_bytes=0)
    return dict(num_threads=groups, thread_name="group", compiler_params=no_scratch)
