"""Reference of linear layers: x @ weight.T with float32 accumulation.

A quantised weight is dequantised one tile of rows at a time, to limit memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import column_tiles, dispatch, formats, fp8_tiles

TILE = 512
"""Weight rows that are dequantised at once; a multiple of `formats.BLOCK`."""


ROWS = 8
"""Rows of each product with quantised rows on a CPU; the last block is padded with zero rows."""


def linear(
    x: jax.Array,  # [..., K]
    weight: jax.Array,  # [N, K], in tiles [N / 64, K, 64], mxfp4 [N, K / 2]
    scale: jax.Array | None,  # as in `formats`
    bias: jax.Array | None,  # [N]
    out_dtype: jnp.dtype,
    *,
    in_blocks: bool = False,
) -> jax.Array:
    """With `in_blocks` a row's bits on a CPU do not depend on the number of rows, see
    `_product_of_blocks`."""
    if scale is not None and formats.kind(weight, scale) == "fp8_tiles":
        weight = fp8_tiles.restore(weight)
    if x.dtype == jnp.float16:  # a scaled weight may be too small for float16
        x = x.astype(jnp.float32)
    N = weight.shape[0]
    multiply = _product_of_blocks if in_blocks and dispatch.platform() == "cpu" else product
    if column_tiles.is_tiled(weight, scale):
        y = column_tiles.product(x, weight)
    elif scale is None or N <= TILE:
        y = multiply(x, formats.dequantize(weight, scale, x.dtype), out_dtype)
    else:
        y = _tiled(x, weight, scale, out_dtype, multiply)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(out_dtype)


def product(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """x [..., K] times weight [N, K] of the same dtype; [..., N], in float32 if `out_dtype` is.

    A float32 result is rounded to the dtype of `x` within `dispatch.references(rounded=True)`.
    """
    if out_dtype == jnp.float32 and x.dtype != jnp.float32:
        if dispatch.trace().rounds_products:
            return _dot(x, weight, None).astype(jnp.float32)
        return _widened(x, weight)
    return _dot(x, weight, None)


def _product_of_blocks(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """`product` of `ROWS` rows at a time.

    XLA orders a sum over K by the number of rows. Where the next product quantises its rows, a
    difference in the last bit can become half a step of e4m3.
    """
    *rows, K = x.shape
    x = x.reshape(-1, K)
    R = x.shape[0]
    blocks = jnp.pad(x, ((0, -R % ROWS), (0, 0))).reshape(-1, ROWS, K)
    y = jax.lax.map(lambda block: product(block, weight, out_dtype), blocks)
    return y.reshape(-1, y.shape[-1])[:R].reshape(*rows, -1)


def _dot(x: jax.Array, weight: jax.Array, wide: jnp.dtype | None) -> jax.Array:
    if x.dtype == jnp.bfloat16 and x.size == x.shape[-1] and dispatch.platform() == "cpu":
        # XLA multiplies one row by a loop of its own, which takes up to 12 times as long as two
        # rows and adds in another order.
        pair = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return _dot(pair, weight, wide)[0].reshape(*x.shape[:-1], -1)
    # HIGHEST keeps float32 inputs: the default rounds them to TF32 on GPUs.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=wide,
    )


@jax.custom_vjp
def _widened(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Float32 product of narrower inputs, with gradients computed in the dtype of the inputs.

    JAX would multiply float32 cotangents in float32, at twice the time and traffic.
    """
    return _dot(x, weight, jnp.float32)


def _widened_fwd(x, weight):
    return _widened(x, weight), (x, weight)


def _widened_bwd(saved, g):
    return jax.vjp(lambda x, weight: _dot(x, weight, None), *saved)[1](g.astype(saved[0].dtype))


_widened.defvjp(_widened_fwd, _widened_bwd)


def _tiled(
    x: jax.Array, weight: jax.Array, scale: jax.Array, out_dtype: jnp.dtype, multiply: Callable
) -> jax.Array:
    """[..., N]: a loop over full tiles, and one shorter tile."""
    N = weight.shape[0]
    scale_rows = TILE if scale.shape[0] == N else TILE // formats.BLOCK
    num_tiles = N // TILE

    def tile(i: jax.Array | int, num_rows: int, num_scales: int) -> jax.Array:
        # The barrier ties the weight to the loop index. Otherwise XLA on a CPU converts all of an
        # fp8 weight before the loop.
        values, i = jax.lax.optimization_barrier((weight, i))
        values = jax.lax.dynamic_slice_in_dim(values, i * TILE, num_rows)
        factors = jax.lax.dynamic_slice_in_dim(scale, i * scale_rows, num_scales)
        return multiply(x, formats.dequantize(values, factors, x.dtype), out_dtype)

    whole = jax.lax.map(lambda i: tile(i, TILE, scale_rows), jnp.arange(num_tiles))
    y = jnp.moveaxis(whole, 0, -2).reshape(*x.shape[:-1], num_tiles * TILE)
    if N % TILE:
        rest = tile(num_tiles, N % TILE, scale.shape[0] - num_tiles * scale_rows)
        y = jnp.concatenate([y, rest], axis=-1)
    return y
