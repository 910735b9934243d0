"""Every name that the kernels take from parts of jax that are not public, with the reason for each.

Kernels are written with `jax.experimental.pallas.mosaic_gpu` (plgpu), whose arrays are those of a
warpgroup. The body of a `plgpu.inline_mgpu` function is different: its Python code runs once, while
the kernel is lowered, and emits MLIR operations on the registers of one thread, which every thread
of the warpgroup executes (lane semantics). plgpu has no names for those operations and arrays. A
new version of jax may rename them, so no other file of pallas_kernels imports from `jax._src`,
`jaxlib` or `jax.experimental.mosaic` (tests/test_house.py checks it).

Each name, what it is, and why the public API does not serve:

- `FragmentedArray`: an array in the registers of a warpgroup, in lane semantics. It is the type of
  operands and results of `inline_mgpu`; plgpu does not export it.
- `WGMMA_LAYOUT`, `WGMMA_LAYOUT_8BIT`, `tmem_native_layout`: layouts of such arrays, with
  `registers_shape`. `plgpu.Layout` names layouts without their register counts.
- `constant`: an MLIR constant from a Python number. `jax.extend.mlir` has only the verbose
  constructor.
- `bitcast`, `vector_slice`: reinterpret or cut the bits of one register. `lax` works on whole
  arrays, whose layout inference rejects these views.
- `memref_reshape`, `memref_slice`: views of an array in shared memory. `ref.at` views of strided
  columns fail in layout inference.
- `memref_ptr`: the address of an array in device memory. plgpu has no addresses, which two GPUs
  exchange.
- `warpgroup_barrier`: a barrier of a warpgroup's threads. That of plgpu also orders copies by TMA,
  which takes longer.
- `llvm`: the MLIR dialect with inline PTX, missing from `jax.extend.mlir.dialects`.

`ir` and the dialects `arith`, `memref`, `scf` and `vector` are public (`jax.extend.mlir`).
"""

from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import (
    WGMMA_LAYOUT,
    WGMMA_LAYOUT_8BIT,
    FragmentedArray,
    tmem_native_layout,
)
from jax.experimental.mosaic.gpu import c as constant
from jax.experimental.mosaic.gpu.utils import (
    bitcast,
    memref_ptr,
    memref_reshape,
    memref_slice,
    vector_slice,
    warpgroup_barrier,
)
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector


def i32() -> ir.Type:
    """The type of 32-bit integers, which have no sign in MLIR."""
    return ir.IntegerType.get_signless(32)


__all__ = [
    "WGMMA_LAYOUT",
    "WGMMA_LAYOUT_8BIT",
    "FragmentedArray",
    "arith",
    "bitcast",
    "constant",
    "i32",
    "ir",
    "llvm",
    "memref",
    "memref_ptr",
    "memref_reshape",
    "memref_slice",
    "scf",
    "tmem_native_layout",
    "vector",
    "vector_slice",
    "warpgroup_barrier",
]
