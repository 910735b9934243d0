"""Products of float32 arrays in registers that no compiler fuses with the sum that follows.

A fused multiply-add rounds once, a product and a sum round twice. LLVM decides for each kernel
whether it fuses, and which of two products it fuses with their sum; ptxas may fuse what is left. So
two kernels that must have the same bits, or two forms of one kernel, may differ. Inline PTX is
opaque to LLVM, and ptxas never fuses `mul.rn`. Interpreters never fuse.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir


def rounded_product(
    x_reg: jax.Array, y_reg: jax.Array, layout: plgpu.Layout, interpret: Any
) -> jax.Array:
    """x * y, float32 arrays of one shape in `layout`, rounded; `interpret` is that of the
    kernel."""
    if interpret is not None:
        return x_reg * y_reg
    made = plgpu.ShapeDtypeStruct(x_reg.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=made)
    def multiply(_, x, y):
        out = np.empty(x.registers.shape, dtype=object)
        out.flat = list(map(_register, x.registers.flat, y.registers.flat))
        return mlir.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return multiply(x_reg, y_reg)


def _register(x: Any, y: Any) -> Any:
    """The products of two vectors of float32."""
    type_ = mlir.ir.F32Type.get()
    products = []
    for i in range(mlir.ir.VectorType(x.type).shape[0]):
        pair = [mlir.vector.extract(register, [], [i]) for register in (x, y)]
        products.append(mlir.llvm.inline_asm(type_, pair, "mul.rn.f32 $0, $1, $2;", "=f,f,f"))
    return mlir.vector.from_elements(x.type, products)
