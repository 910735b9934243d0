"""Causal attention that also returns the log-sum-exp of its scores, and its backward pass.

A row of softmax attention may be split over two sets of keys. Let `lse` be the log-sum-exp over
both, and `out` the combined result. The gradients of one set's queries, keys and values need only
its scores, `lse` and `out`: the weights are exp(score - lse), and the only sum over keys is out .
d(out). The backward pass of flash attention computes the same (arXiv 2307.08691), so cuDNN's
kernels can be used.

Shapes: q, out [B, T, N, H]; k, v [B, T, K, H]; lse float32 [B, T, N]; row t sees keys 0..t.
"""

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, flash: bool) -> tuple[jax.Array, jax.Array]:
    """(out, lse). `flash` takes cuDNN's kernel; inputs are then bfloat16 or float16, on a GPU."""
    return _cudnn_forward(q, k, v) if flash else _forward(q, k, v)


def gradients(q, k, v, out, lse, d_out, *, flash: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v. `out` and `lse` cover all keys of a row, not only these."""
    if flash:
        return _cudnn_backward(q, k, v, out, lse, d_out)
    return _backward(q, k, v, out, lse, d_out)


def _grouped(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, T, K, G, H]."""
    B, T, N, H = x.shape
    return x.reshape(B, T, num_kv_heads, N // num_kv_heads, H)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """float32 [B, K, G, T, S]; -inf for keys that a row does not see."""
    T = q.shape[1]
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", _grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32
    )
    return jnp.where(jnp.tri(T, dtype=bool), scores * q.shape[-1] ** -0.5, -jnp.inf)


def _forward(q, k, v):
    scores = _scores(q, k)
    lse = jax.nn.logsumexp(scores, axis=-1)  # [B, K, G, T]
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(q.shape), jnp.moveaxis(lse, 3, 1).reshape(q.shape[:3])


def _backward(q, k, v, out, lse, d_out):
    K = k.shape[2]
    wide = jnp.float32
    lse, dot = (
        jnp.moveaxis(x.reshape(*x.shape[:2], K, -1), 1, 3)  # [B, K, G, T]
        for x in (lse, (out.astype(wide) * d_out.astype(wide)).sum(-1))
    )
    weights = jnp.exp(_scores(q, k) - lse[..., None])
    d_out = _grouped(d_out, K)
    d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, v, preferred_element_type=wide)
    d_scores = (weights * (d_weights - dot[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = jnp.einsum("bkgts,bskh->btkgh", d_scores, k)
    dk = jnp.einsum("bkgts,btkgh->bskh", d_scores, _grouped(q, K))
    dv = jnp.einsum("bkgts,btkgh->bskh", weights.astype(q.dtype), d_out)
    return dq.reshape(q.shape), dk, dv


def _cudnn_forward(q, k, v):
    # jax's public function rounds the log-sum-exp to the inputs' dtype: 3 % error in bfloat16.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    out, lse = cudnn.dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask_type=cudnn.MaskType.CAUSAL, return_residual=True
    )
    return out, jnp.moveaxis(lse, 1, 2)


def _cudnn_backward(q, k, v, out, lse, d_out):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    none = jnp.zeros(0, q.dtype)
    return tuple(
        cudnn._dot_product_attention_bwd_p_wrapper.bind(
            q,
            k,
            v,
            *[none] * 7,  # bias, lengths, offsets, page tables
            jnp.moveaxis(lse, 2, 1),
            out,
            d_out,
            scale=q.shape[-1] ** -0.5,
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),  # no bias, no gradient of it
            mask_type=cudnn.MaskType.CAUSAL,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=None,
        )
    )
