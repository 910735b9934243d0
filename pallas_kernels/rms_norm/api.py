"""RMSNorm over the last axis, alone or after a residual sum."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.rms_norm import reference

MAX_PARTS = 32
_WIDTHS = range(256, 8192 + 1, 64)
"""Row widths of the kernel. One block per narrow row would be mostly launch overhead."""


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    out_dtype: jnp.dtype | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x / sqrt(mean(x²) + eps) * scale`, computed in float32.

    Args:
      x: [..., D].
      scale: [D].
      out_dtype: dtype of the result, default `x.dtype`; float16 saturates.
    Returns:
      [..., D]; the bits of a row do not depend on other rows.
    Raises:
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    launch = _resolve(implementation, x)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if launch is None:
        return reference.rms_norm(x, scale, eps, out_dtype)
    from pallas_kernels.rms_norm import mosaic_gpu  # slow to import

    rows = x.reshape(-1, x.shape[-1])
    normed = mosaic_gpu.rms_norm(rows, scale, eps=eps, out_dtype=out_dtype, launch=launch)
    return normed.reshape(x.shape)


def add_rms_norm(
    h: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    routed: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    inner: tuple[jax.Array, float] | None = None,
    factor: jax.Array | None = None,
    out_dtypes: Sequence[jnp.dtype] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Adds `delta` to the residual stream and norms the sum.

    `delta` may be parts: the partial sums of a K-split product, or the results of a row's experts.
    The sum is `sum_s weights[s, r] * delta[rows[s, r]]`, in float32 and by ascending s. It may be
    normed before it is added (`inner`), and what it makes of h multiplied (`factor`), as in Gemma.

    Args:
      h: [..., D].
      delta: [..., D], or parts [parts, ..., D] 1 to 32 of them; with `routed` a buffer [slots, D].
        Float32 or bfloat16, independent of h; converted to float32 before it is weighted and added.
      scale: [D].
      routed: (weights float32 [parts, R'], rows int32 [parts, R']), R' not below the number of rows
        of h: part s of row r is `delta[rows[s, r]]`.
      bias: [D], added to the sum of the parts; refused with `routed`.
      inner: (scale [D], eps); the sum of the parts is rounded to `h.dtype`, and its `rms_norm` is
        added.
      factor: [1], multiplies `h + delta`.
      out_dtypes: dtypes of the norm, one for each copy of it that is needed; default one in
        `h.dtype`. float16 saturates.
    Returns:
      `(h + delta) * factor` in `h.dtype`, then `rms_norm` of it in each of `out_dtypes`; all [...,
      D]. Every sum, norm and product is rounded to `h.dtype` once, before the next operation. The
      bits of a row do not depend on other rows.
    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    weights, rows = routed or (None, None)
    check(h, delta, scale, routed=routed, bias=bias, inner=inner, factor=factor)
    launch = _resolve(implementation, h, delta)
    out_dtypes = (h.dtype,) if out_dtypes is None else tuple(map(jnp.dtype, out_dtypes))
    if launch is None:
        return reference.add_rms_norm(
            h, delta, scale, eps, weights, rows, bias, inner, factor, out_dtypes
        )
    from pallas_kernels.rms_norm import mosaic_gpu  # slow to import

    D = h.shape[-1]
    if rows is None:
        delta = delta.reshape(1 if delta.ndim == h.ndim else delta.shape[0], -1, D)
    inner_scale, inner_eps = inner or (None, None)
    added = mosaic_gpu.Added(delta, weights, rows, bias, inner_scale, factor)
    outs = mosaic_gpu.add_rms_norm(
        h.reshape(-1, D),
        added,
        scale,
        eps=eps,
        inner_eps=inner_eps,
        out_dtypes=out_dtypes,
        launch=launch,
    )
    return tuple(out.reshape(h.shape) for out in outs)


def check(
    h: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    routed: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    inner: tuple[jax.Array, float] | None = None,
    factor: jax.Array | None = None,
) -> None:
    """Raises the ValueError of `add_rms_norm` if shapes do not fit; the arguments are its own."""
    weights, rows = routed or (None, None)
    for name, row in (("scale", scale), ("bias", bias), ("inner scale", inner and inner[0])):
        if row is not None and row.shape != h.shape[-1:]:
            raise ValueError(
                f"{name}.shape={row.shape} must be {h.shape[-1:]}, one for each column of h"
            )
    if factor is not None and factor.shape != (1,):
        raise ValueError(f"{factor.shape=} must be (1,)")
    if rows is not None and bias is not None:
        raise ValueError("a bias is for parts without rows")
    if rows is not None:
        _check_rows(h, delta, weights, rows)
        return
    parts = delta.ndim == h.ndim + 1
    if (delta.shape[1:] if parts else delta.shape) != h.shape:
        raise ValueError(f"{delta.shape=} must be {h.shape=}, or that after a number of parts")
    if parts and not 1 <= delta.shape[0] <= MAX_PARTS:
        raise ValueError(
            f"{delta.shape=} has {delta.shape[0]} parts; at most {MAX_PARTS} are added"
        )


def _check_rows(h, delta, weights, rows) -> None:
    if delta.ndim != 2 or delta.shape[1] != h.shape[-1]:
        raise ValueError(
            f"{delta.shape=} must be a buffer [slots, {h.shape[-1]}] that rows point into"
        )
    R = h.size // h.shape[-1]
    if rows.ndim != 2 or not 1 <= rows.shape[0] <= MAX_PARTS or rows.shape[1] < R:
        raise ValueError(f"{rows.shape=} must be 1 to {MAX_PARTS} parts of at least {R} rows")
    if rows.dtype != jnp.int32:
        raise ValueError(f"rows are int32: {rows.dtype=}")
    if weights.shape != rows.shape or weights.dtype != jnp.float32:
        raise ValueError(f"rows come with float32 weights of their shape {rows.shape}")


def _resolve(
    implementation: dispatch.Implementation | None, *arrays: jax.Array
) -> dispatch.Launch | None:
    D = arrays[0].shape[-1]
    odd = [x.dtype for x in arrays if x.dtype not in (jnp.bfloat16, jnp.float32)]
    refusal = None
    if D not in _WIDTHS:
        refusal = f"{D} columns are not a multiple of 64 from {_WIDTHS[0]} to {_WIDTHS[-1]}"
    elif odd:
        refusal = f"{odd[0]} is neither bfloat16 nor float32"
    return dispatch.resolve("rms_norm", implementation, refusal=refusal)
