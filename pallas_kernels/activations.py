"""Rows of activations: their dtype, whole tiles, and e4m3 with one scale for each row and group of
128 columns.

The scheme of e4m3 rows is that of FP8 checkpoints with dynamic activations: the scale of a group is
its largest magnitude divided by 448, the largest e4m3 number, so nothing overflows. A row's numbers
depend on the row alone.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.formats import BLOCK

Activations = Literal["bf16", "fp8"]
"""How products with fp8 weights read their activations: as they are, or quantised."""
LARGEST = 448.0


def row_dtype(
    values: jax.Array, scale: jax.Array | None, dtype: jnp.dtype = jnp.bfloat16
) -> jnp.dtype:
    """The dtype in which a norm should store rows that this weight multiplies; `dtype` is that of
    the stream.

    It is float16 for fp8 weights in tiles and a bfloat16 stream, else `dtype`. e4m3 numbers become
    float16 in one instruction for two, and bfloat16 in four. A normed number has 11 bits then
    instead of 8.

    The magnitude of a normed number is at most sqrt(D) * max|w| for D columns and the norm's weight
    w. It exceeds float16's largest number, 65,504, only if max|w| is above 1,447 (D = 2,048) or 893
    (D = 5,376); `rounded` then saturates. Other rows stay in `dtype`: the product of gate and up
    has no bound.
    """
    in_tiles = scale is not None and formats.kind(values, scale) == "fp8_tiles"
    return jnp.dtype(jnp.float16) if in_tiles and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def result_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the stream whose rows have `dtype`: bfloat16 for float16 rows (`row_dtype`)."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.float16 else dtype)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x, float32, in `dtype`. NaN stays NaN.

    float16 and e4m3 saturate, at 65,504 and 448: infinity times a weight of 0 is NaN, and a plain
    conversion to e4m3 gives NaN on overflow.
    """
    if dtype in (jnp.float16, jnp.float8_e4m3fn):
        most = float(jnp.finfo(dtype).max)
        x = jnp.minimum(jnp.maximum(x, -most), most)
    return x.astype(dtype)


def dtype_refusal(dtype: jnp.dtype, values: jax.Array, scale: jax.Array | None) -> str | None:
    """Why GPU kernels do not multiply rows of `dtype` by this weight, or None."""
    taken = dict.fromkeys((jnp.dtype(jnp.bfloat16), row_dtype(values, scale)))
    if dtype in taken:
        return None
    return f"activations must be {' or '.join(map(str, taken))}, not {dtype}"


class Quantized(NamedTuple):
    """Rows [..., K] in e4m3.

    Attributes:
      values: float8_e4m3fn [R, K].
      scale: float32 [ceil(K / 128), R'], which multiplies the values of a group; R' is R rounded up
        to a multiple of 8, because TMA copies 16 bytes or more. Entries past R are unspecified.
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array) -> Quantized:
    """Quantises rows x [R, K]; a group of zeros has scale 1."""
    R, K = x.shape
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -K % BLOCK))).reshape(R, -1, BLOCK)
    largest = jnp.abs(groups).max(-1)
    # A subnormal scale would be flushed to 0.
    smallest = jnp.finfo(jnp.float32).tiny
    scale = jnp.where(largest == 0, 1.0, jnp.maximum(largest * (1 / LARGEST), smallest))
    values = (groups / scale[..., None]).astype(jnp.float8_e4m3fn).reshape(R, -1)[:, :K]
    return Quantized(values, jnp.pad(scale, ((0, -R % 8), (0, 0)), constant_values=1.0).T)


def dequantize(x: Quantized) -> jax.Array:
    """The rows as float32 [R, K]."""
    R, K = x.values.shape
    scale = jnp.repeat(x.scale.T[:R], BLOCK, axis=1)[:, :K]
    return x.values.astype(jnp.float32) * scale


def as_quantized(x: jax.Array) -> jax.Array:
    """x [..., K] as its quantised rows represent it, float32."""
    return dequantize(quantize(x.reshape(-1, x.shape[-1]))).reshape(x.shape)


def whole_rows(batch: int, rows: int) -> int:
    """Rows per sequence, at least `rows`, with which products of x [batch, rows, K] need no
    padding.

    Padding is a kernel of its own before each product. A caller that computes this many rows avoids
    it, and computes no more rows than the padded product. `rows` itself where no number does that.
    """
    whole = batch * rows + missing_rows(batch * rows)
    return whole // batch if dispatch.platform() == "cuda" and whole % batch == 0 else rows


def missing_rows(R: int) -> int:
    """Rows of zeros below R rows: above 8 TMA copies tiles of 8."""
    return -R % 8 if R > 8 else 0


def rounding(
    activations: Activations, values: jax.Array, scale: jax.Array | None
) -> Callable[[jax.Array], jax.Array] | None:
    """What rounds the rows x [..., K] of products with a weight to float32; None: they are read as
    they are.

    Raises:
      ValueError: there are no such activations, or no such format of weights.
    """
    return as_quantized if are_quantized(activations, values, scale) else None


def are_quantized(activations: Activations, values: jax.Array, scale: jax.Array | None) -> bool:
    """Whether products with this weight quantise their activations by `quantize`.

    Raises:
      ValueError: there are no such activations.
    """
    if activations not in get_args(Activations):
        raise ValueError(f"{activations=} must be one of {get_args(Activations)}")
    return activations == "fp8" and formats.kind(values, scale) == "fp8"
