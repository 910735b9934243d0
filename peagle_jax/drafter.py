"""The drafter head: EAGLE-3 with any number of layers, run in parallel (P-EAGLE) or autoregressively.

Slot p of the drafter combines the embedding of token x_{p+1} with the target's tapped state g_p, has
RoPE position p, and predicts x_{p+2} (docs/algorithm.md, "Positions: shift by one"). P-EAGLE appends
J-1 mask slots, whose token is the mask token and whose state is the learned `mask_hidden`: one pass
yields all J drafts. EAGLE-3 feeds its output back as the next state: one pass per draft.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.activations import whole_rows
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
from peagle_jax.parallel import partition, vocabulary
from peagle_jax.sampling import draft_keys, probabilities, sample_rows
from peagle_jax.selector import Selector, candidates, rows_of, sampled_walk, walk
from peagle_jax.survival import confidence_of


class Buffer(nnx.Variable):
    """An array that is stored with the weights but not trained."""


class FirstLayer(nnx.Module):
    """Layer 0 ("midlayer" in checkpoints): its attention reads [norm(embedding), norm(hidden)], 2D wide."""

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
    """Weights of a head and its forward pass over rows. The drafter classes below arrange the rows."""

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
        self.selector = Selector(config, dtype=dtype, rngs=rngs) if config.selector_rank else None

    def fuse(self, taps: jax.Array) -> jax.Array:
        """Tapped states [..., A*Dt] -> [..., D]. Mask rows use `fuse(mask_hidden)`."""
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
          target: the target model; its embedding is used if the head has none.
          tokens, positions: [B, T] int32.
          hidden: [B, T, D], output of `fuse` or of `feedback`.
          cache, attend, keep: as in `models.Decoder`.
        Returns:
          (output before the final norm, [B, T, D] or with `keep` [B, n, D]; the updated cache).
        """
        embed = target.embed if self.embed is None else self.embed
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        last = len(self.layers)
        layer_args = lambda i: (angles, cache[i], attend, keep if i == last else None)
        h, delta, first_cache = self.first(embed(tokens), hidden, *layer_args(0))
        new_cache = [first_cache]
        for i, layer in enumerate(self.layers, start=1):
            _, h, delta, layer_cache = layer(h, delta, *layer_args(i))
            new_cache.append(layer_cache)
        return delta.added_to(h), new_cache

    def logits(self, target, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits over the draft vocabulary [..., Vd], see `parallel.vocabulary`."""
        normed = self.norm(hidden)
        if self.lm_head is not None:
            out = self.lm_head(normed, out_dtype=jnp.float32)
        elif target.lm_head is not None:
            out = target.lm_head(normed, out_dtype=jnp.float32)
        else:
            out = target.embed.unembed(normed)
        out = vocabulary.real(out, self.config.draft_vocab_size)
        return out * self.config.logit_scale if self.config.logit_scale != 1.0 else out

    def edges(self, target, hidden: jax.Array, candidates: jax.Array) -> jax.Array:
        """The selector's scores of a position's candidates after each candidate of the one before.

        Args:
          hidden: [B, J, D], output of the layers.
          candidates: [B, J, C] draft ids.
        Returns:
          [B, J, C, C] float32; zeros at the first position, which has no candidates before it.
        """
        embed = target.embed if self.embed is None else self.embed
        owner = target if self.lm_head is None else self
        unembedding = (owner.embed if owner.lm_head is None else owner.lm_head).weight[...]
        embedded = embed(self.to_target_ids(candidates[:, :-1]))
        normed = self.norm(hidden[:, 1:])
        score = lambda columns: self.selector(embedded, normed, columns)
        edges = vocabulary.by_columns(score, unembedding, candidates[:, 1:])
        return jnp.pad(edges, ((0, 0), (1, 0), (0, 0), (0, 0)))

    def feedback(self, hidden: jax.Array) -> jax.Array:
        """The next state in autoregressive drafting: the output, normalised if `norm_output` is set."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def to_target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Draft vocabulary ids -> target ids: `id + d2t[id]`; `d2t` stores offsets."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[...][draft_ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a drafter: the rows of a call, with tokens shifted by one.

    Row j of sequence b is slot `start[b] + j`. Rows `j < num_real[b]` are real; the last real row holds
    the newest token.
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
    """Drafts of B sequences.

    Attributes:
      tokens: [B, J] int32, target ids.
      probs: [B, J, V] float32, their distributions; None: argmax drafts.
      confidence: [B, J] float32, the drafter's largest probability at each position, whichever token is
        drafted; None: 1 at all positions. Only survival reads it (`survival`).
    """

    tokens: jax.Array
    probs: jax.Array | None
    confidence: jax.Array | None = None


class Drafter(Protocol):
    """A source of drafts. A dataclass and a pytree: arrays are leaves, the rest is static.

    `dataclasses.replace(drafter, num_draft=K)` is the same drafter with another K.
    """

    num_draft: int

    def propose(
        self, target, inputs: DraftInputs, cache: list[LayerCache]
    ) -> tuple[Proposal, list[LayerCache]]:
        """Drafts after the newest token, `num_draft` (at least 1) per sequence; the updated cache."""

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]) -> list[LayerCache]:
        """The cache after the real rows as `propose` leaves it there, without drafts: K = 0.

        The cache then holds every position of the text, so later rounds draft as well as before.
        """


Sampling = Literal["argmax", "sample"]


def _choose(
    head: DraftHead, logits, positions, inputs: DraftInputs, sampling: Sampling
) -> Proposal:
    """Drafts from logits [B, J, Vd]; `positions` [B, J] are the positions of the drafted tokens."""
    confidence = confidence_of(logits)
    if sampling == "argmax":
        best = vocabulary.argmax(logits).astype(jnp.int32)
        return Proposal(head.to_target_ids(best), None, confidence)
    probs = probabilities(logits, inputs.temperature[:, None])
    ids = sample_rows(probs, _keys(inputs, positions))
    if head.d2t is not None:
        probs = vocabulary.whole(probs, head.config.draft_vocab_size)
        target_ids = head.to_target_ids(jnp.arange(probs.shape[-1]))
        wide = jnp.zeros((*probs.shape[:-1], head.config.vocab_size), probs.dtype)
        probs = vocabulary.columns(wide.at[..., target_ids].set(probs))
    return Proposal(head.to_target_ids(ids), probs, confidence)


def _keys(inputs: DraftInputs, positions: jax.Array) -> jax.Array:
    """Keys [B, J] of the drafts at `positions` [B, J]."""
    return draft_keys(inputs.keys, positions, inputs.start + inputs.num_real)


def candidate_scores(
    head: DraftHead, target, out: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Candidates of J drafts and how well each follows each of those before, by the head's selector.

    Args:
      out: [B, J, D], output of the layers; logits: [B, J, Vd].
    Returns:
      (draft ids [B, J, C], scores [B, J, C, C] of candidate b, the last axis, after candidate a).
    """
    ids, at = candidates(logits, head.config.draft_vocab_size)
    return ids, at[..., None, :] + head.edges(target, out, ids)


def _select(
    head: DraftHead, target, out, logits, positions, inputs: DraftInputs, sampling: Sampling
) -> Proposal:
    """Drafts that the head's selector chooses; `out` [B, J, D] is the layers' output, see `_choose`.

    The confidence is the largest probability of a draft given the drafts before it.
    """
    found, scores = candidate_scores(head, target, out, logits)
    ids = head.to_target_ids(found)
    chosen = lambda taken: jnp.take_along_axis(ids, taken[..., None], axis=-1)[..., 0]
    with partition.over(1):  # all devices have all candidates
        if sampling == "argmax":
            taken = walk(jnp.argmax(scores, axis=-1).astype(jnp.int32))
        else:
            taken, laws = sampled_walk(scores, inputs.temperature, _keys(inputs, positions))
        confidence = confidence_of(rows_of(scores, taken))
    if sampling == "argmax":
        return Proposal(chosen(taken), None, confidence)
    return Proposal(
        chosen(taken), vocabulary.scattered(ids, laws, head.config.vocab_size), confidence
    )


def _absorb(head: DraftHead, target, inputs: DraftInputs, cache: list[LayerCache]):
    """`Drafter.absorb` of a head. XLA drops what only the unused output needs: the last layer's MLP."""
    positions = inputs.start[:, None] + jnp.arange(inputs.tokens.shape[1])
    attend = PagedAttention(inputs.page_table, inputs.slots, positions)
    hidden = head.fuse(inputs.taps)
    return head(target, inputs.tokens, hidden, positions, cache, attend)[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParallelDrafter:
    """P-EAGLE: one pass over [T real rows | J-1 mask rows] (docs/algorithm.md, "One round").

    `mask_state` is `fuse(mask_hidden)`, computed once by `make_drafter`. With `selects` the head's
    selector chooses the drafts.
    """

    head: DraftHead
    mask_state: jax.Array  # [D]
    num_draft: int = field(metadata=dict(static=True))
    sampling: Sampling = field(metadata=dict(static=True))
    selects: bool = field(default=False, metadata=dict(static=True))

    def propose(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        """Example: T = 4, J = 3 and num_real = 2 give the rows [real, real, mask, mask, pad, pad].

        Row 1 holds the newest token and predicts draft 1; rows 2 and 3 predict drafts 2 and 3. Padding
        rows are mask rows after the chain: causal attention hides them from the rows before, and the next
        round overwrites their keys and values. The last row is repeated where products would pad.
        """
        (B, T), J = inputs.tokens.shape, self.num_draft
        rows = jnp.minimum(jnp.arange(whole_rows(B, T + J - 1)), T + J - 2)
        real = rows < inputs.num_real[:, None]  # [B, R]
        pad, mask_id = ((0, 0), (0, len(rows) - T)), self.head.config.mask_token_id
        tokens = jnp.where(real, jnp.pad(inputs.tokens, pad, mode="edge"), mask_id)
        hidden = jnp.pad(self.head.fuse(inputs.taps), (*pad, (0, 0)), mode="edge")
        hidden = jnp.where(real[..., None], hidden, self.mask_state.astype(hidden.dtype))
        positions = inputs.start[:, None] + rows
        attend = PagedAttention(inputs.page_table, inputs.slots, positions)
        chain = jnp.minimum(jnp.arange(whole_rows(B, J)), J - 1)
        picked = jnp.maximum(inputs.num_real[:, None] - 1, 0) + chain
        out, cache = self.head(target, tokens, hidden, positions, cache, attend, picked)
        drafted_at = inputs.start[:, None] + picked[:, :J] + 2
        logits = self.head.logits(target, out)[:, :J]
        rest = (logits, drafted_at, inputs, self.sampling)
        if self.selects:
            return _select(self.head, target, out[:, :J], *rest), cache
        return _choose(self.head, *rest), cache

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        return _absorb(self.head, target, inputs, cache)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AutoregressiveDrafter:
    """EAGLE-3: one pass over the real rows, then J-1 passes of one row (docs/algorithm.md, "One round")."""

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
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *proposals), cache

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        return _absorb(self.head, target, inputs, cache)


def make_drafter(
    head: DraftHead, num_draft: int, sampling: Sampling, *, selector: bool = True
) -> Drafter:
    """The drafter of a head, by its config's `method`. `selector` False ignores the head's selector.

    Call it again after the head's weights change: it computes P-EAGLE's `mask_state` once.
    """
    if head.config.method == "peagle":
        mask_state = head.fuse(head.mask_hidden[...][None])[0]
        selects = selector and head.selector is not None
        return ParallelDrafter(head, mask_state, num_draft, sampling, selects)
    return AutoregressiveDrafter(head, num_draft, sampling)
