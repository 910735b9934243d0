"""Building blocks shared by targets and drafter: Linear, RMSNorm, Attention, GatedMLP, Embed.

No block owns a KV cache. `Attention` takes a function `attend` (see `Attend`), which stores the new
keys and values and computes attention: paged in serving (`cache.PagedAttention`), dense in
training. A block returns its addition to the residual stream as a `Delta`; the next RMSNorm adds it
(fused add and norm). Axis letters are defined in docs/architecture.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import column_tiles
from pallas_kernels.activations import Activations, result_dtype, row_dtype
from pallas_kernels.block_gemm.api import add_in_order, linear, partial_products
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from pallas_kernels.rope_write.api import Form
from pallas_kernels.rope_write.reference import apply_rope
from peagle_jax.config import AttentionConfig
from peagle_jax.parallel import partition


class Attend(Protocol):
    """How a block attends: the one contract of all models and heads, in serving and in training."""

    def __call__(
        self,
        rows: "AttentionRows",
        cache: Any,
        *,
        window: int | None,
        scale: float,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Attends causally from the rows of a call to themselves and to the rows before them.

        Args:
          rows: queries, keys and values of B sequences of T rows, not computed yet. Call either
            `rows.heads()` for q, k and v as arrays, or `rows.projected()` for the operands of
            `rope_write`, which computes them and writes K and V to the cache in one kernel.
          cache: what the implementation keeps of one layer between calls: a `cache.LayerCache` in
            serving; None, or K and V of earlier rows in training.
          window: number of keys that a row sees, its own included; None: all.
          scale: factor of the scores.
          sinks: [N], one logit per query head that joins the softmax without a value; None: none.
        Returns:
          (output [B, T, N, H] in the dtype of the activations, the cache for the next call).
        """


INIT_STD = 0.02


class Delta(NamedTuple):
    """A block's addition to the residual stream, in parts; the next norm sums them as it reads.

    Two forms. Dense: `values` [parts, ..., D], float32 partial sums or the parts of several devices
    in the dtype of the stream, to be summed. Routed: `values` is a buffer [slots, D], float32 or
    bfloat16; row r of the stream adds the sum over s of `weights[s, r] * values[rows[s, r]]`, with
    `weights` float32 and `rows` int32 [parts, R'] (R' >= R, surplus columns are ignored). A dense
    sum may have a `bias` [D], which is added to it. The sum may pass through a `norm` before it is
    added, and the stream is then multiplied by a `factor` [1], if there is one.
    """

    values: jax.Array
    weights: jax.Array | None = None
    rows: jax.Array | None = None
    bias: jax.Array | None = None
    norm: "RMSNorm | None" = None
    factor: jax.Array | None = None

    def added_to(self, h: jax.Array) -> jax.Array:
        """The stream after h [..., D]; sum, norm and product are each rounded to h's dtype."""
        if self.rows is None:
            total = add_in_order(self.values.astype(jnp.float32))
            if self.bias is not None:
                total = total + self.bias.astype(jnp.float32)
        else:
            R = h.size // h.shape[-1]
            parts = self.values[self.rows[:, :R]] * self.weights[:, :R, None]
            total = add_in_order(parts).reshape(h.shape)
        if self.norm is not None:
            total = self.norm(total.astype(h.dtype)).astype(jnp.float32)
        h = (h.astype(jnp.float32) + total).astype(h.dtype)
        if self.factor is None:
            return h
        return (h.astype(jnp.float32) * self.factor.astype(jnp.float32)).astype(h.dtype)


class Linear(nnx.Module):
    """`x @ weight.T + bias`. The weight is stored [out, in], so `in` is contiguous.

    A checkpoint loader may replace it by a quantised weight with a `scale`
    (pallas_kernels.formats), and `weight_order` by tiles. `activations` says how products with an
    fp8 weight read x, see `quantized_activations`.
    """

    activations: Activations = "bf16"

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float, dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (outputs, inputs), dtype))
        self.scale = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: jax.Array, out_dtype=None) -> jax.Array:
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return linear(
            x,
            self.weight[...],
            scale=scale,
            bias=bias,
            out_dtype=out_dtype,
            activations=self.activations,
        )

    def row_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype of its normed rows in a stream of `dtype` (`activations.row_dtype`)."""
        scale = None if self.scale is None else self.scale[...]
        return row_dtype(self.weight[...], scale, dtype)

    def parts(self, x: jax.Array) -> jax.Array:
        """Partial products without the bias: float32 [parts, ..., out], to be summed in order."""
        scale = None if self.scale is None else self.scale[...]
        return partial_products(x, self.weight[...], scale=scale, activations=self.activations)

    def delta(self, x: jax.Array) -> Delta:
        """The output as a `Delta`; with several devices each multiplies its own columns of x."""
        parts = partition.parts_of_all(self.parts(x), result_dtype(x.dtype))
        return Delta(parts, bias=None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis."""

    def __init__(self, width: int, *, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps, out_dtype=out_dtype)

    def after(
        self, h: jax.Array, delta: Delta | None, out_dtype: jnp.dtype | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(`delta.added_to(h)`, norm of it in `out_dtype`) in one kernel; without a delta (h, norm
        of h)."""
        if delta is None:
            return h, self(h, out_dtype)
        values, weights, rows, bias, norm, factor = delta
        return add_rms_norm(
            h,
            values,
            self.weight[...],
            eps=self.eps,
            routed=None if rows is None else (weights, rows),
            bias=bias,
            inner=None if norm is None else (norm.weight[...], norm.eps),
            factor=factor,
            out_dtypes=(out_dtype or h.dtype,),
        )


class Embed(nnx.Module):
    """Token embedding. Tied output projections call `unembed`; NNX must not share a parameter."""

    def __init__(self, vocab: int, width: int, *, std: float, dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (vocab, width), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if column_tiles.is_tiled(self.weight[...], None):
            return column_tiles.rows(self.weight[...], tokens)
        if partition.size() == 1:
            return self.weight[...][tokens]
        rows = self.weight.shape[0]  # of this device
        local = jnp.clip(tokens - partition.rank() * rows, 0, rows - 1)
        embedded = partition.gathered(self.weight[...][local])
        return jnp.take_along_axis(embedded, (tokens // rows)[None, ..., None], axis=0)[0]

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits [..., V], of this device's rows."""
        return linear(hidden, self.weight[...], out_dtype=jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention with a fused q/k/v projection, configured by `AttentionConfig`.

    `widths` = (input width, output width): (D, D), or (2D, D) in layer 0 of a drafter.
    """

    def __init__(
        self,
        config: AttentionConfig,
        widths: tuple[int, int],
        *,
        eps: float,
        std_out: float,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.config = config
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        inputs, outputs = widths
        qkv_width = (N + (1 if config.shared_kv else 2) * K) * H
        init = dict(dtype=dtype, rngs=rngs)
        self.qkv = Linear(inputs, qkv_width, bias=config.bias, std=INIT_STD, **init)
        self.out = Linear(N * H, outputs, bias=config.output_bias, std=std_out, **init)
        norm = lambda: RMSNorm(H, eps=eps, dtype=dtype)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.eps = eps
        self.sinks = nnx.Param(jnp.zeros(N, dtype)) if config.sinks else None

    def __call__(self, x: jax.Array, angles, cache, attend: Attend, keep: jax.Array | None = None):
        """x [B, T, inputs] -> (delta [B, T, outputs], or of rows `keep` [B, n]; cache)."""
        config = self.config
        out, cache = attend(
            AttentionRows(self, x, angles),
            cache,
            window=config.window,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.out.delta(kept(out.reshape(*x.shape[:-1], -1), keep)), cache


class Projected(NamedTuple):
    """Operands of `rope_write`: it sums the parts, then applies bias, norms and rope."""

    parts: jax.Array  # [parts, B, T, (N + 2K) * H] float32, partial sums of the projection
    angles: tuple[jax.Array, jax.Array]  # cosines and sines, each [B, T, H/2] float32
    form: Form
    norms: tuple[jax.Array, jax.Array] | None  # weights of the norms of q and k, each [H]
    bias: jax.Array | None  # [(N + 2K) * H]


@dataclass(frozen=True)
class AttentionRows:
    """Rows of one attention block before their projection to queries, keys and values."""

    block: Attention
    x: jax.Array  # [B, T, inputs]
    angles: tuple[jax.Array, jax.Array]  # cosines and sines, each [B, T, H/2] float32

    def heads(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, T, N, H], k and v [B, T, K, H] in the dtype of the stream, after norm and rope."""
        block, config = self.block, self.block.config
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        heads = block.qkv(self.x).reshape(*self.x.shape[:-1], -1, H)
        q, k = heads[..., :N, :], heads[..., N : N + K, :]
        v = k if config.shared_kv else heads[..., N + K :, :]
        if block.q_norm is not None:
            q, k = block.q_norm(q), block.k_norm(k)
        if config.value_norm:
            v = rms_norm(v, jnp.ones(H, v.dtype), eps=block.eps)
        return apply_rope(q, self.angles), apply_rope(k, self.angles), v

    def projected(self) -> Projected:
        """The projection's partial products, and what `rope_write` needs to finish q, k and v."""
        block, config = self.block, self.block.config
        return Projected(
            parts=block.qkv.parts(self.x),
            angles=self.angles,
            form=Form(
                num_heads=config.num_heads,
                eps=block.eps,
                shared_kv=config.shared_kv,
                value_norm=config.value_norm,
                dtype=result_dtype(self.x.dtype),
            ),
            norms=None
            if block.q_norm is None
            else (block.q_norm.weight[...], block.k_norm.weight[...]),
            bias=None if block.qkv.bias is None else block.qkv.bias[...],
        )


def kept(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Gathers rows `keep` [B, n] of x [B, T, D] -> [B, n, D]. None keeps all rows."""
    return x if keep is None else jnp.take_along_axis(x, keep[..., None], axis=1)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` with a fused gate/up projection; SwiGLU by default."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        std_out: float,
        dtype,
        rngs: nnx.Rngs,
        bias: bool = False,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        self.activation = activation
        init = dict(bias=bias, dtype=dtype, rngs=rngs)
        self.gate_up = Linear(width, 2 * inner, std=INIT_STD, **init)
        self.down = Linear(inner, width, std=std_out, **init)

    def after(self, h: jax.Array, delta: Delta, norm: RMSNorm) -> tuple[jax.Array, Delta]:
        """(the stream `delta.added_to(h)`, the MLP's delta of its norm)."""
        h, x = norm.after(h, delta, self.gate_up.row_dtype(h.dtype))
        return h, self(x)

    def __call__(self, x: jax.Array) -> Delta:
        gate_up = add_in_order(self.gate_up.parts(x))
        if self.gate_up.bias is not None:
            gate_up = gate_up + self.gate_up.bias[...].astype(jnp.float32)
        inner = _gated(self.activation, gate_up)
        return self.down.delta(inner.astype(result_dtype(x.dtype)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: Callable[[jax.Array], jax.Array], gate_up: jax.Array) -> jax.Array:
    """`activation(gate) * up` of gate and up side by side, [..., 2 * inner] -> [..., inner]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activation(gate) * up


def _gated_bwd(activation, gate_up, g):
    # One pass over both halves. Of a concatenation XLA writes the halves, then copies them.
    pairs = gate_up.reshape(*gate_up.shape[:-1], 2, -1)
    other, g = jnp.flip(pairs, axis=-2), g[..., None, :]
    slope = jax.jvp(activation, (pairs,), (jnp.ones_like(pairs),))[1]
    is_gate = jnp.arange(2)[:, None] == 0
    return (jnp.where(is_gate, g * other * slope, g * activation(other)).reshape(gate_up.shape),)


_gated.defvjp(lambda activation, gate_up: (_gated(activation, gate_up), gate_up), _gated_bwd)


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: attention, then an MLP (`mlp`, by default SwiGLU)."""

    def __init__(self, config, layer: int, *, dtype, rngs: nnx.Rngs, mlp: nnx.Module | None = None):
        std_out = INIT_STD / math.sqrt(2 * config.num_layers)
        D, eps = config.hidden_size, config.norm_eps
        init = dict(std_out=std_out, dtype=dtype, rngs=rngs)
        self.input_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.attention = Attention(config.attention(layer), (D, D), eps=eps, **init)
        self.post_norm = RMSNorm(D, eps=eps, dtype=dtype)
        if mlp is None:
            mlp = GatedMLP(D, config.intermediate_size, bias=config.mlp_bias, **init)
        self.mlp = mlp

    def __call__(self, h: jax.Array, delta: Delta | None, angles, cache, attend: Attend, keep=None):
        """Runs the layer on the stream `h + delta` [B, T, D].

        With `keep` [B, n], all rows write K and V, and only these rows continue after attention.

        Returns:
          (the stream entering the layer [B, T, D], the stream after attention, the MLP's delta to
          it, cache).
        """
        entered, x = self.input_norm.after(h, delta, self.attention.qkv.row_dtype(h.dtype))
        out, cache = self.attention(x, angles, cache, attend, keep)
        h, out = self.mlp.after(kept(entered, keep), out, self.post_norm)
        return entered, h, out, cache
