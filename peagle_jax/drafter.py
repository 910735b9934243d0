"""The drafter head: EAGLE-3 generalised to several layers, run in parallel (P-EAGLE) or step by step.

Slot p of the drafter combines the embedding of token x_{p+1} with the target's tapped state g_p, sits
at rope position p, and predicts x_{p+2} ("shift by one"). P-EAGLE appends J-1 mask slots, whose token
is the mask token and whose state is the learned `mask_hidden`, so one pass yields all J drafts.
EAGLE-3 feeds its own output back instead, one pass a draft.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.cache import LayerCache, PagedAttention
from peagle_jax.config import DrafterConfig
from peagle_jax.layers import (
    INIT_STD,
    Attend,
    Attention,
    DecoderLayer,
    Embed,
    GatedMLP,
    Linear,
    RMSNorm,
    kept,
    rope_angles,
)
from peagle_jax.sampling import draft_keys, probabilities, sample_rows


class Buffer(nnx.Variable):
    """A stored array that is not trained."""


class FirstLayer(nnx.Module):
    """Layer 0 ("midlayer"): attends over [norm(embedding), norm(hidden)], width 2D in, D out."""

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.attention = Attention(
            config.attention(0), (2 * D, D), eps=eps, std_out=INIT_STD, dtype=dtype, rngs=rngs
        )
        self.post_norm = RMSNorm(D, eps=eps, dtype=dtype)
        init = dict(bias=config.mlp_bias, std_out=INIT_STD, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(D, config.intermediate_size, **init)

    def __call__(self, embedding, h, angles, cache, attend: Attend, keep: jax.Array | None = None):
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        x = jnp.concatenate([self.input_norm(embedding), normed], axis=-1)
        out, cache = self.attention(x, angles, cache, attend, keep)
        h, x = self.post_norm.after(kept(residual, keep), out)
        return h, self.mlp(x), cache


class DraftHead(nnx.Module):
    """Weights of a head and its forward pass over arbitrary rows; knows nothing of rounds."""

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        fused = config.num_taps * config.target_hidden_size
        self.config = config
        self.embed = (
            Embed(config.vocab_size, D, std=INIT_STD, dtype=dtype, rngs=rngs)
            if config.own_embedding
            else None
        )
        self.input_norm = RMSNorm(fused, eps=eps, dtype=dtype) if config.norm_before_fc else None
        norms = config.num_taps if config.fc_norm else 0
        self.fc_norm = nnx.List(
            [RMSNorm(config.target_hidden_size, eps=eps, dtype=dtype) for _ in range(norms)]
        )
        self.fc = Linear(fused, D, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs)
        self.mask_hidden = (
            nnx.Param(jax.random.normal(rngs.params(), (fused,), dtype))
            if config.method == "peagle"
            else None
        )
        self.first = FirstLayer(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(1, config.num_layers)]
        )
        self.norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.lm_head = (
            Linear(D, config.draft_vocab_size, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs)
            if config.own_lm_head
            else None
        )
        self.d2t = (
            Buffer(jnp.zeros(config.draft_vocab_size, jnp.int32))
            if config.draft_vocab_size != config.vocab_size
            else None
        )

    def fuse(self, taps: jax.Array) -> jax.Array:
        """Tapped states [..., A*Dt] -> [..., D] (peagle-spec 1.2); `mask_hidden` goes through it too."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm:
            chunks = jnp.split(taps, len(self.fc_norm), axis=-1)
            taps = jnp.concatenate(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], axis=-1
            )
        return self.fc(taps)

    def __call__(
        self,
        target,
        tokens: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: list,
        attend: Attend,
        keep: jax.Array | None = None,
    ):
        """Runs the layers over rows.

        Args:
          target: the target model, whose embedding is used when the head has none.
          tokens, positions: [B, T] int32.
          hidden: [B, T, D] fused states, or fed-back states.
          cache, attend, keep: as for a target.
        Returns:
          (output [B, T, D], or [B, n, D], before the final norm, the updated cache).
        """
        embed = target.embed if self.embed is None else self.embed
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        last = len(self.layers)
        of_layer = lambda i: (angles, cache[i], attend, keep if i == last else None)
        h, delta, first_cache = self.first(embed(tokens), hidden, *of_layer(0))
        new_cache = [first_cache]
        for i, layer in enumerate(self.layers, start=1):
            _, h, delta, layer_cache = layer(h, delta, *of_layer(i))
            new_cache.append(layer_cache)
        return delta.added_to(h), new_cache

    def logits(self, target, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits over the draft vocabulary [..., Vd]."""
        normed = self.norm(hidden)
        if self.lm_head is not None:
            out = self.lm_head(normed, out_dtype=jnp.float32)
        elif target.lm_head is not None:
            out = target.lm_head(normed, out_dtype=jnp.float32)
        else:
            out = target.embed.unembed(normed)
        return out * self.config.logit_scale if self.config.logit_scale != 1.0 else out

    def feedback(self, hidden: jax.Array) -> jax.Array:
        """What autoregressive drafting feeds back: the output, normed when `norm_output` is set."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def to_target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Draft vocabulary ids -> target ids: `id + d2t[id]`, the stored offsets."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[...][draft_ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInputs:
    """What a drafter may use to propose: the round's rows in the drafter's shifted alignment.

    Row j of sequence b is slot `start[b] + j`; rows `j < num_real[b]` are real, and the last of them
    carries the token just emitted.
    """

    tokens: jax.Array  # [B, T] int32: row j holds the token at position start + j + 1
    taps: jax.Array  # [B, T, A*D]: tapped target states at position start + j
    num_real: jax.Array  # [B] int32
    start: jax.Array  # [B] int32
    page_table: jax.Array  # [B, W] int32
    slots: jax.Array  # [B] int32, the engine's slots
    keys: jax.Array  # [B] request keys
    temperature: jax.Array  # [B] float32


class Proposal(NamedTuple):
    """J drafts [B, J] int32 as target ids, and their probabilities [B, J, V] (None: argmax drafts)."""

    tokens: jax.Array
    probs: jax.Array | None


class Drafter(Protocol):
    """Anything that proposes. A pytree: arrays are leaves, the rest is static."""

    num_draft: int

    def propose(
        self, target, inputs: DraftInputs, cache: list[LayerCache]
    ) -> tuple[Proposal, list[LayerCache]]: ...


Sampling = Literal["argmax", "sample"]


def _choose(
    head: DraftHead, logits, positions, inputs: DraftInputs, sampling: Sampling
) -> Proposal:
    """Draft tokens from logits [B, J, Vd]; `positions` [B, J] are those of the drafted tokens."""
    if sampling == "argmax":
        return Proposal(head.to_target_ids(jnp.argmax(logits, axis=-1).astype(jnp.int32)), None)
    probs = probabilities(logits, inputs.temperature[:, None])
    ids = sample_rows(probs, draft_keys(inputs.keys, positions))
    if head.d2t is not None:
        target_ids = head.to_target_ids(jnp.arange(logits.shape[-1]))
        wide = jnp.zeros((*probs.shape[:-1], head.config.vocab_size), probs.dtype)
        probs = wide.at[..., target_ids].set(probs)
    return Proposal(head.to_target_ids(ids), probs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParallelDrafter:
    """P-EAGLE: [T real rows | J-1 mask rows] in one pass (peagle-spec 3.2, 3.3, 3.14).

    `mask_state` is `fuse(mask_hidden)`, computed once by `parallel_drafter`.
    """

    head: DraftHead
    mask_state: jax.Array  # [D]
    num_draft: int = field(metadata=dict(static=True))
    sampling: Sampling = field(metadata=dict(static=True))

    def propose(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        """With T = 4 rows, J = 3 and num_real = 2 the rows are [real, next, mask, mask, pad, pad]:
        row 1 predicts draft 1, rows 2 and 3 drafts 2 and 3. Pads are mask rows past the chain; no
        earlier row sees them and the next round overwrites them.
        """
        B, T = inputs.tokens.shape
        J = self.num_draft
        rows = jnp.arange(T + J - 1)
        real = rows < inputs.num_real[:, None]  # [B, R]
        pad = ((0, 0), (0, J - 1))
        tokens = jnp.where(real, jnp.pad(inputs.tokens, pad), self.head.config.mask_token_id)
        hidden = jnp.pad(self.head.fuse(inputs.taps), (*pad, (0, 0)))
        hidden = jnp.where(real[..., None], hidden, self.mask_state.astype(hidden.dtype))
        positions = inputs.start[:, None] + rows
        attend = PagedAttention(inputs.page_table, inputs.slots, positions)
        picked = jnp.maximum(inputs.num_real[:, None] - 1, 0) + jnp.arange(J)  # [B, J]
        out, cache = self.head(target, tokens, hidden, positions, cache, attend, picked)
        drafted_at = inputs.start[:, None] + picked + 2
        logits = self.head.logits(target, out)
        return _choose(self.head, logits, drafted_at, inputs, self.sampling), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AutoregressiveDrafter:
    """EAGLE-3: one pass over the real rows, then J-1 single-row passes (peagle-spec 3.12)."""

    head: DraftHead
    num_draft: int = field(metadata=dict(static=True))
    sampling: Sampling = field(metadata=dict(static=True))

    def propose(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        B, T = inputs.tokens.shape
        positions = inputs.start[:, None] + jnp.arange(T)
        attend = PagedAttention(inputs.page_table, inputs.slots, positions)
        hidden = self.head.fuse(inputs.taps)
        last = jnp.maximum(inputs.num_real[:, None] - 1, 0)  # [B, 1]
        out, cache = self.head(target, inputs.tokens, hidden, positions, cache, attend, last)
        position = inputs.start[:, None] + last  # [B, 1] slot of the newest row
        proposals = []
        for step in range(self.num_draft):
            logits = self.head.logits(target, out)
            proposals.append(_choose(self.head, logits, position + 2, inputs, self.sampling))
            if step + 1 == self.num_draft:
                break
            position = position + 1
            attend = PagedAttention(inputs.page_table, inputs.slots, position)
            token = proposals[-1].tokens
            out, cache = self.head(target, token, self.head.feedback(out), position, cache, attend)
        tokens = jnp.concatenate([p.tokens for p in proposals], axis=1)
        probs = None
        if self.sampling == "sample":
            probs = jnp.concatenate([p.probs for p in proposals], axis=1)
        return Proposal(tokens, probs), cache


def make_drafter(head: DraftHead, num_draft: int, sampling: Sampling) -> Drafter:
    """Wraps a head for serving as its config's method says.

    Call it again after changing the head's weights: P-EAGLE's mask state is computed here once.
    """
    if head.config.method == "peagle":
        mask_state = head.fuse(head.mask_hidden[...][None])[0]
        return ParallelDrafter(head, mask_state, num_draft, sampling)
    return AutoregressiveDrafter(head, num_draft, sampling)
