"""Contract of a chip's matrix multiply-accumulate (MMA): weight tile times x tile, float32 sums.

The weight is the M operand (64 rows with wgmma, 128 with tcgen05) and the tokens are
the N operand ("swap-AB"): M is then always full, and N is padded to a multiple of 8 only. Operands
are bfloat16 or float16, or e4m3 with quantised activations. There are two ways to multiply, and
`Codec.unpacked` decides:

- stored: both operands are read from shared memory (plain weights; e4m3 weights and activations).
- unpacked: threads convert the weights to the dtype of x, `part` columns at a time. They are the
  first operand, from registers (Hopper) or from tensor memory (Blackwell). x is read from shared
  memory.

In names and comments a part is a number of columns of a tile, `parts` is the number of weights that
share x, and `pieces` is the number of token ranges that are multiplied one after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.weight_tiles.codecs import Codec


@dataclass(frozen=True)
class Operands:
    """Operands of one step in shared memory.

    Attributes:
      tiles_smem: `codec.dtype` [rows, codec.width], one per weight that shares x.
      x_smem: `codec.x_dtype` [tokens, codec.step], columns in `codec.arrange` order.
      scales_smem: staged scales uint8 [rows * K / 32] of each tile, or empty.
      step: number of the tiles along K.
      x_scale_smem: scale of each row of x, float32 [tokens], if `codec.x_scaled`; else None.
    """

    tiles_smem: Sequence[Any]
    x_smem: Any
    scales_smem: Sequence[Any]
    step: Any
    x_scale_smem: Any = None

    def unpacker(
        self, codec: Codec, mma: "Mma", i: int, interpret: Any
    ) -> Callable[[int], jax.Array]:
        """Unpacker of tile i, see `Codec.unpacker`."""
        scales_smem = self.scales_smem[i] if codec.staged else None
        return codec.unpacker(mma, self.tiles_smem[i], scales_smem, self.step, interpret)


class Mma(ABC):
    """Tensor cores of one chip.

    Attributes:
      rows: weight rows of one tile (M of the instruction).
      part: columns that one call of a codec's unpacker returns.
      layout: register layout of a product [rows, tokens].
      transposed: register layout for the transposed store to shared memory.
    """

    rows: ClassVar[int]
    part: ClassVar[int]
    layout: ClassVar[plgpu.Layout]
    transposed: ClassVar[plgpu.Layout]

    def groups(self, wanted: int) -> int:
        """Warpgroups of a block, given the preferred number."""
        return 1

    def pieces(self, codec: Codec, tokens: int, groups: int) -> int:
        """Number of token ranges of a tile, multiplied one after the other to limit register
        pressure."""
        return 1

    def scratch(self, codec: Codec, parts: int, tokens: int) -> dict[str, Any]:
        """Scratch of a block that `add_products` needs."""
        return {}

    @abstractmethod
    def add_products(
        self,
        codec: Codec,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        operands: Operands,
        refill: Callable[[], None],
        interpret: Any,
        **scratch: Any,
    ) -> list[jax.Array]:
        """Adds each weight tile times x to its totals: `total += factor * (tile @ x.T)`.

        Args:
          totals_reg: float32 [rows, tokens / pieces] in `layout`; `pieces` totals per tile, tokens
            ascending.
          factors: float32 scalars, one per tile: the block scale, or `codec.rescale`.
          operands: tiles and x of the step.
          refill: called after the last read of the tiles and of x.
          scratch: see `scratch`.
        Returns:
          The new totals.
        """

    @abstractmethod
    def unpack_fp8(self, tile_smem: Any) -> Callable[[int], jax.Array]:
        """Unpacker of an e4m3 tile [rows, 128], see `Codec.unpacker`. Exact."""

    def unpack_fp8_tile(
        self, tile_smem: Any, interpret: Any, dtype: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Unpacker of an e4m3 tile [512, 16] in the order of `pallas_kernels.fp8_tiles` to `dtype`.
        Exact."""
        raise NotImplementedError(f"{type(self).__name__} has no order of fp8 tiles")

    @abstractmethod
    def unpack_mxfp4(
        self, tile_smem: Any, scales_smem: Any, step: Any, interpret: Any
    ) -> Callable[[int], jax.Array]:
        """Unpacker of an mxfp4 tile uint8 [rows, 128], see `Codec.unpacker` and `mxfp4`."""

    @abstractmethod
    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Pads an array with one element per weight row along `axis` as `load_rows` requires."""

    @abstractmethod
    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Broadcasts source_gmem[first : first + rows] to float32 [rows, tokens]; unspecified past
        N."""


def scaled_sums(
    codec: Codec,
    totals_reg: Sequence[jax.Array],
    factors: Sequence[jax.Array],
    products_reg: Iterable[jax.Array],
) -> list[jax.Array]:
    """Scales the products of a step and adds them to the totals, in order; float32
    [rows, tokens]."""
    return [
        total + (product * factor if codec.scaled else product)
        for total, product, factor in zip(totals_reg, products_reg, factors, strict=True)
    ]
