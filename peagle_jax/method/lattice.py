"""The lattice selector: LiLiCorr (arXiv 2608.20530) on the drafts of a P-EAGLE head.

Where `selector.Selector` scores a pair of candidates by what each is, this one first lets all
candidates of a round see each other. A candidate c of draft d starts as

    x = token e(c) + hidden h_d + MLP(features) + slot d + rank c

with the embedding e(c), the head's normed state h_d, and five features of the head's law: log p, p,
log p less that of the likeliest, rank, and whether it is the likeliest. Two transformer layers over
the J x C candidates follow. With a the head's state at draft 1, which has seen the newest token,

    f = silu(joint [x, a, x * a])
    edge_d(a, b) = 8 <bounded(out f_a), bounded(into f_b)>

and S_d(b | a) = logit_d(b) + edge_d(a, b), as of the other selector. The walk and its law are the
same too. Draft 1 follows the state a instead of a candidate.

Two rules differ from the paper's. A candidate sees its own draft and those before it, so a draft
does not depend on how many follow: K may change from round to round. And edges are added to the
head's logits instead of replacing them, so an untrained selector changes no draft.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.method.selector import CANDIDATES
from peagle_jax.models.layers import Linear, RMSNorm

_SCALE = 8.0
"""Largest edge: the paper's."""
_LAYERS = 2
_HEAD_DIM = 32
_DRAFTS = 8
"""Drafts with a slot of their own, where a head does not state how many it was trained for; those
behind them share the last one."""
_FEATURES = 5


class _Layer(nnx.Module):
    """Attention over the candidates, and an MLP."""

    def __init__(self, width: int, *, eps: float, dtype, rngs: nnx.Rngs):
        self.num_heads = max(1, width // _HEAD_DIM)
        linear = partial(Linear, bias=False, std=width**-0.5, dtype=dtype, rngs=rngs)
        self.attention_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.up = linear(width, 2 * width)
        self.down = linear(2 * width, width)

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B, R, W] of R candidates; bias [N, R, R] float32, -inf where one does not see the
        other."""
        B, R, W = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(B, R, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(product("brnh,bsnh->bnrs", q, k) * q.shape[-1] ** -0.5 + bias)
        mixed = product("bnrs,bsnh->brnh", weights.astype(x.dtype), v)
        x = x + self.out(mixed.astype(x.dtype).reshape(B, R, W))
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class Lattice(nnx.Module):
    """Weights of the edges. `into` starts at zero: an untrained selector changes no draft."""

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, W, eps = config.hidden_size, config.selector_rank, config.norm_eps
        drafts, heads = config.trained_num_draft or _DRAFTS, max(1, W // _HEAD_DIM)
        linear = partial(Linear, bias=False, dtype=dtype, rngs=rngs)
        zeros = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))
        self.token = linear(D, W, std=D**-0.5)
        self.hidden = linear(D, W, std=D**-0.5)
        self.anchor = linear(D, W, std=D**-0.5)
        self.features = linear(_FEATURES, W, std=1.0)
        self.mixed = linear(W, W, std=W**-0.5)
        self.slots = zeros(drafts, W)
        self.ranks = zeros(min(CANDIDATES, config.draft_vocab_size), W)
        self.distances = zeros(heads, drafts)
        layer = partial(_Layer, W, eps=eps, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer() for _ in range(_LAYERS)])
        self.norm = RMSNorm(W, eps=eps, dtype=dtype)
        self.anchor_norm = RMSNorm(W, eps=eps, dtype=dtype)
        self.joint = linear(3 * W, W, std=(3 * W) ** -0.5)
        self.start = linear(W, W, std=W**-0.5)
        self.out = linear(W, W, std=W**-0.5)
        self.into = linear(W, W, std=0.0)

    def __call__(self, embedded: jax.Array, hidden: jax.Array, log_probs: jax.Array) -> jax.Array:
        """Edges of J drafts with C candidates each.

        Args:
          embedded: [B, J, C, D], embeddings of the candidates.
          hidden: [B, J, D], the head's normed states.
          log_probs: [B, J, C] float32, the head's, largest first.
        Returns:
          [B, J, C, C] float32, from candidate a of the draft before to candidate b, the last axis;
          at the first draft the same for every a.
        """
        B, J, C = log_probs.shape
        slot = jnp.minimum(jnp.arange(J), len(self.slots) - 1)
        features = self.features(_features(log_probs).astype(embedded.dtype))
        x = self.token(embedded) + self.hidden(hidden)[:, :, None]
        x = x + self.mixed(jax.nn.silu(features))
        x = (x + self.slots[...][slot][:, None] + self.ranks[...]).reshape(B, J * C, -1)
        bias = self._bias(J, C)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.norm(x).reshape(B, J, C, -1)
        anchor = self.anchor_norm(self.anchor(hidden[:, :1]))
        seen = jnp.broadcast_to(anchor[:, :, None], x.shape)
        f = jax.nn.silu(self.joint(jnp.concatenate([x, seen, x * seen], axis=-1)))
        first = jnp.broadcast_to(self.start(anchor)[:, :, None], f[:, :1].shape)
        before = jnp.concatenate([first, self.out(f[:, :-1])], axis=1)
        return _SCALE * jnp.einsum(
            "bjaw,bjcw->bjac",
            _bounded(before),
            _bounded(self.into(f)),
            precision=jax.lax.Precision.HIGHEST,
        )

    def _bias(self, J: int, C: int) -> jax.Array:
        """[N, J * C, J * C] float32, by the distance of the drafts of two candidates."""
        draft = jnp.arange(J * C) // C
        behind = draft[:, None] - draft
        near = jnp.clip(behind, 0, self.distances.shape[1] - 1)
        bias = self.distances[...].astype(jnp.float32)[:, near]
        return jnp.where(behind >= 0, bias, -jnp.inf)


def _features(log_probs: jax.Array) -> jax.Array:
    """[..., C] -> [..., C, 5], of mean 0 and variance 1 over the five."""
    C = log_probs.shape[-1]
    rank = jnp.broadcast_to(jnp.arange(C) / max(C - 1, 1), log_probs.shape)
    gap = log_probs - log_probs[..., :1]
    parts = [log_probs, jnp.exp(log_probs), gap, rank, (rank == 0).astype(jnp.float32)]
    return jax.nn.standardize(jnp.stack(parts, axis=-1), epsilon=1e-5)


def _bounded(x: jax.Array) -> jax.Array:
    """x [..., W] in float32 as a vector shorter than 1, with a derivative at zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1.0)
