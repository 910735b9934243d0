"""Pipeline and codecs of weight tiles: load by TMA, dequantise to bfloat16, multiply on tensor cores.

The weight is the M operand of the MMA (64 rows on Hopper, 128 on Blackwell) and the tokens are the N
operand ("swap-AB"), so a small batch does not pad M. Quantised weights are stored in device memory
at 4 or 8 bits and converted to bfloat16 in registers. Products are bfloat16 with float32 accumulation.
(Hopper's FP8 MMA accumulates with fewer bits and would need quantised activations.)

After each K step the partial product is multiplied by its block scale and added to a float32 total.
(MXFP4 weights are scaled while they are unpacked, see `weight_tiles_mxfp4`.) The order of a sum depends
only on K and on the number of K chunks, not on the number of rows in the call.

Timeline of one warpgroup with stages = 3 (load n: the TMA copies of step n are in flight):

            prologue   step 0    step 1    step 2    step 3    step 4
    slot 0  load 0     mma 0     load 3    load 3    mma 3     load 6
    slot 1  load 1     load 1    mma 1     load 4    load 4    mma 4
    slot 2  load 2     load 2    load 2    mma 2     load 5    load 5

With many tokens the limit is L2 bandwidth. Then 2 or 4 warpgroups of a block each own a weight tile and
share the x tiles. Warpgroup 0 loads x one step after the weights, see `Pipeline._refill`:

    w slot 0, each warpgroup  load 0  mma 0   load 3  load 3  mma 3
    x slot 0, shared          load 0  mma 0   -       load 3  mma 3

`weight_tiles_sm90` and `weight_tiles_sm100` implement `Format` for one chip each; `weight_chips` selects.
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
"""K columns of a bfloat16 or fp8 tile; equal to `formats.BLOCK`, so that an fp8 tile has one scale."""

MXFP4_RESCALE = weight_tiles_mxfp4.RESCALE
"""Factor on products with mxfp4 tiles."""

_SWIZZLE = 128  # bytes


def swizzled(dtype: jnp.dtype) -> tuple:
    """Shared-memory layout without bank conflicts: 128-byte swizzle of tiles of 8 rows."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))


@dataclass(frozen=True)
class Format:
    """Storage format of one weight, and its MMA on one chip.

    Attributes:
      kind: see `formats`.
      per_row: fp8 with one scale per row ([N, 1]), applied to the total after the K loop.
      rows: weight rows of one tile (M of the MMA).
      layout: register layout of a product [rows, tokens].
      transposed: register layout for the transposed store to shared memory.
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
    def block_scaled(self) -> bool:
        """Whether each tile has one scale, applied to the product of that tile."""
        return self.kind == "fp8" and not self.per_row

    @property
    def dtype(self) -> jnp.dtype:
        kinds = dict(plain=jnp.bfloat16, fp8=jnp.float8_e4m3fn, mxfp4=jnp.uint8)
        return jnp.dtype(kinds[self.kind])

    @property
    def step(self) -> int:
        """K columns of one tile."""
        return weight_tiles_mxfp4.STEP if self.kind == "mxfp4" else STEP

    @property
    def width(self) -> int:
        """Stored elements in one row of a tile."""
        return self.step // 2 if self.kind == "mxfp4" else self.step

    @property
    def unpacked(self) -> bool:
        """Whether threads convert the tile in registers. Plain tiles are read by the MMA directly."""
        return self.kind != "plain"

    @property
    def staged(self) -> bool:
        """Whether the scales of all of K are copied to shared memory before the first step."""
        return self.kind == "mxfp4"

    def groups(self, wanted: int) -> int:
        """Warpgroups of a block, given the preferred number."""
        return 1

    def pieces(self, tokens: int, groups: int) -> int:
        """Number of MMAs that split a token tile, to limit register pressure."""
        return 1

    def stages(self, wanted: int, num_steps: int, most: int) -> int:
        """Pipeline stages, at least two. `wanted` counts stages of 64 rows; larger tiles get fewer."""
        return min(max(2, wanted * 64 // self.rows), num_steps, most)

    def most_stages(
        self, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int, device: Device
    ) -> int:
        """Most stages that fit into the shared memory of a block; arguments as in `scratch`."""
        weights, scales = self.width * self.dtype.itemsize, K // formats.GROUP * self.staged
        stored = _stored(tokens, groups) * jnp.dtype(out_dtype).itemsize
        rest = groups * self.rows * (parts * scales + stored) + 2048  # barriers, alignment
        slot = groups * parts * self.rows * weights + tokens * self.step * 2
        return (device.smem_bytes - rest) // slot

    def scratch(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int = 1
    ) -> dict[str, Any]:
        """Scratch of a block: slots and barriers of `Pipeline`, staged scales, and the output tile.

        If warpgroups share x, each has its own weight slots, scales and output tile. A chip's subclass
        adds what its `add_products` needs.
        """
        transforms = swizzled(self.dtype)
        if self.kind == "mxfp4":  # no tiling: K / 2 may not be a multiple of the tile width
            transforms = transforms[1:]
        shared = groups > 1
        out = (_stored(tokens, groups), self.rows)
        w, x = (groups * stages, parts, self.rows, self.width), (stages, tokens, self.step)
        arrivals = parts + (not shared)  # weight copies, and the copy of x
        scratch = dict(
            # [(groups,) stored tokens, rows] out_dtype
            out_smem=plgpu.SMEM((groups, *out) if shared else out, out_dtype),
            w_smem=plgpu.SMEM(w, self.dtype, transforms=transforms),
            x_smem=plgpu.SMEM(x, jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
            ready_barrier=plgpu.Barrier(num_arrivals=arrivals, num_barriers=groups * stages),
        )
        if shared:
            scratch["x_ready_barrier"] = plgpu.Barrier(num_barriers=stages)
            scratch["x_free_barrier"] = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
        if self.staged:
            scales = (groups * parts, self.rows * (K // formats.GROUP))
            scratch["scale_smem"] = plgpu.SMEM(scales, jnp.uint8)
            scratch["scales_ready_barrier"] = plgpu.Barrier(num_arrivals=parts, num_barriers=groups)
        return scratch

    def kernel_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """The scale as a kernel operand. No copy for the shapes of supported models."""
        if self.staged:
            return scale.reshape(-1)
        return self.pad_rows(scale, -2) if self.per_row else scale

    def arrange(self, x: jax.Array) -> jax.Array:
        """Activations [..., K] with the columns in the order of unpacked weights."""
        return weight_tiles_mxfp4.arrange(x) if self.kind == "mxfp4" else x

    def add_products(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        tiles: Sequence[Any],
        x_smem: Any,
        refill: Callable,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
        **scratch: Any,
    ) -> list[jax.Array]:
        """Adds each weight tile [rows, step] in shared memory times x_smem [tokens, step] to its totals.

        Args:
          totals: float32 [rows, tokens / pieces]; `pieces` totals per tile, tokens ascending.
          factors: one per tile: the fp8 block scale, or `MXFP4_RESCALE`; unused otherwise.
          x_smem: bfloat16, columns in `arrange` order.
          refill: called after the last read of the slot.
          scales: mxfp4: the scales of each tile's rows, uint8 [rows * K / 32] in shared memory.
          step: number of the tiles along K.
          scratch: what the chip's `scratch` adds to the common part.
        """
        raise NotImplementedError

    def add(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        products: Iterable[jax.Array],
    ) -> list[jax.Array]:
        """Scales the products and adds them to the totals, in order."""
        scaled = self.block_scaled or self.staged
        return [
            total + (product * factor if scaled else product)
            for total, product, factor in zip(totals, products, factors, strict=True)
        ]

    def zeros(self, parts: int, tokens: int, groups: int) -> list[jax.Array]:
        """Initial totals of `parts` tiles for `add_products`."""
        pieces = self.pieces(tokens, groups)
        zeros = jnp.zeros((self.rows, tokens // pieces), jnp.float32)
        return [plgpu.layout_cast(zeros, self.layout)] * (parts * pieces)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Pads a vector with one element per weight row as `load_rows` requires."""
        raise NotImplementedError

    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Broadcasts source_gmem[first : first + rows] to float32 [rows, tokens]; unspecified past N."""
        raise NotImplementedError

    def store_tokens_first(
        self,
        out_gmem: Any,
        out_smem: Any,
        tiles: Sequence[jax.Array],
        *,
        arranged: bool = False,
        interpret: Any = None,
    ) -> None:
        """Epilogue: stores tiles [rows, tokens / pieces] transposed to out_gmem [tokens, rows].

        The tiles pass through out_smem [n, rows], n tokens at a time. TMA clips rows and tokens outside
        of the array. `arranged` permutes the rows as mxfp4 products expect their input columns.
        """
        size = out_smem.shape[0]
        parts = [_columns(tile, i, size) for tile in tiles for i in range(tile.shape[1] // size)]
        for i, tile in enumerate(parts):
            if arranged:
                weight_tiles_mxfp4.store_arranged(out_smem, tile, self.layout, interpret)
            else:
                out_smem.T[...] = plgpu.layout_cast(tile.astype(out_gmem.dtype), self.transposed)
            plgpu.commit_smem()
            target = out_gmem if len(parts) == 1 else out_gmem.at[pl.ds(i * size, size)]
            plgpu.copy_smem_to_gmem(out_smem, target)
            plgpu.wait_smem_to_gmem(0)


def _stored(tokens: int, groups: int) -> int:
    """Tokens of the output tile that are in shared memory at once during the epilogue."""
    return min(tokens, 64, 128 // groups)


def _columns(tile: jax.Array, i: int, size: int) -> jax.Array:
    return tile if tile.shape[1] == size else tile[:, i * size : (i + 1) * size]


def fetch_tile(source_gmem: Any, tile_smem: Any, barrier: Any) -> None:
    """Starts a TMA copy of a tile; elements outside of the array are filled with zeros."""
    plgpu.copy_gmem_to_smem(source_gmem, tile_smem, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)


def fetch_scales(source_gmem: Any, row: Any, rows: int, scale_smem: Any, barrier: Any) -> None:
    """Starts a bulk copy of the mxfp4 scales of `rows` rows from `row` on.

    source_gmem is uint8 [rows of all weights * K / 32], scale_smem uint8 [rows * K / 32]. One contiguous
    range: a tensor copy needs rows of 16 n bytes. Bytes past the end of the array are not written.
    """
    size = scale_smem.shape[0]
    source = source_gmem.at[pl.ds(row * (size // rows), size)]
    plgpu.copy_gmem_to_smem(source, scale_smem, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED)


@dataclass(frozen=True)
class Pipeline:
    """Multistage pipeline of weight and x tiles, `stages` slots deep; timeline in the module docstring.

    Each warpgroup loads its own weight tiles. Warpgroup 0 loads shared x tiles into released slots.

    Attributes:
      groups: warpgroups of the block.
      num_steps: K steps.
      fetch_weights, fetch_x: start the copies of one step; arguments: step, destination, barrier.
      w_smem: [groups * stages, parts, rows, width].
      x_smem: bfloat16 [stages, tokens, step].
      ready_barrier: weights (and x of a single warpgroup) have arrived; one per warpgroup and slot.
      x_ready_barrier: shared x has arrived; one per slot.
      x_free_barrier: all warpgroups have released x; one per slot.
    """

    form: Format
    groups: int
    stages: int
    num_steps: int
    fetch_weights: Callable
    fetch_x: Callable
    w_smem: Any
    x_smem: Any
    ready_barrier: Any
    x_ready_barrier: Any = None
    x_free_barrier: Any = None

    def start(self) -> None:
        """Prologue: loads the first `stages` steps."""
        for i in range(self.stages):
            step = jnp.int32(i)  # a Python int would be bounds-checked while tracing
            self._fetch(step, i)
            if self.groups > 1:
                pl.when(warpgroup_index(self.groups) == 0)(
                    lambda step=step, i=i: self._fetch_x(step, i, self.x_ready_barrier)
                )

    def wait(self, slot: Any) -> tuple[Any, Any]:
        """Waits for a slot; returns its weight tiles [parts, rows, width] and x tile [tokens, step]."""
        w_slot = self._w_slot(slot)
        plgpu.barrier_wait(self.ready_barrier.at[w_slot])
        if self.groups > 1:
            plgpu.barrier_wait(self.x_ready_barrier.at[slot])
        return self.w_smem.at[w_slot], self.x_smem.at[slot]

    def each_step(self, first: Any, count: Any, visit: Callable, carry: Any) -> Any:
        """Runs `carry = visit(step, slot, refill, carry)` for `count` steps from `first` on.

        `visit` calls `wait(slot)` before it reads the tiles and `refill()` after their last use.
        """

        def body(i, carry):
            i = first + i
            slot = lax.rem(i, self.stages)
            return visit(i, slot, lambda: self._refill(i, slot), carry)

        return lax.fori_loop(0, count, body, carry)

    def _refill(self, step: Any, slot: Any) -> None:
        @pl.when(step + self.stages < self.num_steps)
        def _():
            # Fence: the threads' own reads precede the TMA write. MMA reads need no fence.
            if self.form.unpacked:
                plgpu.commit_smem()
            if self.groups > 1:
                plgpu.barrier_arrive(self.x_free_barrier.at[slot])
            self._fetch(step + self.stages, slot)

        if self.groups > 1:
            # x is refilled one step late, so that warpgroup 0 does not wait for the slowest warpgroup.
            # In lockstep all warpgroups would unpack at once and the tensor cores would idle.
            lag = 1 if self.stages > 2 else 0
            released = step - lag
            x_slot = slot if not lag else lax.rem(slot + self.stages - lag, self.stages)
            has_next = (released >= 0) & (released + self.stages < self.num_steps)

            @pl.when(has_next & (warpgroup_index(self.groups) == 0))
            def _():
                plgpu.barrier_wait(self.x_free_barrier.at[x_slot])
                self._fetch_x(released + self.stages, x_slot, self.x_ready_barrier)

    def _fetch(self, step: Any, slot: Any) -> None:
        w_slot = self._w_slot(slot)
        self.fetch_weights(step, self.w_smem.at[w_slot], self.ready_barrier.at[w_slot])
        if self.groups == 1:
            self._fetch_x(step, slot, self.ready_barrier)

    def _fetch_x(self, step: Any, slot: Any, barrier: Any) -> None:
        self.fetch_x(step, self.x_smem.at[slot], barrier.at[slot])

    def _w_slot(self, slot: Any) -> Any:
        return slot if self.groups == 1 else warpgroup_index(self.groups) * self.stages + slot


def warpgroup_index(groups: int) -> Any:
    """Index of this warpgroup within the block."""
    return lax.axis_index("group") if groups > 1 else 0


def warpgroup_part(ref: Any, groups: int) -> Any:
    """This warpgroup's slice of a ref whose leading axis is the warpgroup."""
    return ref if groups == 1 else ref.at[warpgroup_index(groups)]


def tile_rows(form: Format, groups: int, tile: Any, N: int) -> tuple[Any, Any]:
    """First weight row of this warpgroup's tile in block `tile`: (row to read, row to store).

    Out-of-range warpgroups re-read the last tile and skip the store.
    """
    row = (tile if groups == 1 else tile * groups + warpgroup_index(groups)) * form.rows
    if groups == 1 or N % (groups * form.rows) == 0:
        return row, row
    return jnp.minimum(row, (pl.cdiv(N, form.rows) - 1) * form.rows), row


def launch_options(groups: int) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for blocks of several warpgroups."""
    if groups == 1:
        return {}
    # All warpgroups share the reduction scratch: a cross-warp reduction would be a race. Size 0 forbids it.
    no_scratch = plgpu.CompilerParams(reduction_scratch_bytes=0)
    return dict(num_threads=groups, thread_name="group", compiler_params=no_scratch)
