"""Drafts of a head: EAGLE-3 with any number of layers, run in parallel (P-EAGLE) or
autoregressively; and of a block drafter (DFlash).

Slot p of the drafter combines the embedding of token x_{p+1} with the target's tapped state g_p,
has RoPE position p, and predicts x_{p+2} (docs/algorithm.md, "Positions: shift by one"). P-EAGLE
appends J-1 mask slots, whose token is the mask token and whose state is the learned `mask_hidden`:
one pass yields all J drafts. EAGLE-3 feeds its output back as the next state: one pass per draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_kernels.activations import whole_rows
from peagle_jax.method.block_head import BlockHead
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.sampling import draft_keys, probabilities, sample_rows
from peagle_jax.method.selector import Tables, candidates, sampled_walk, table_edges, walk
from peagle_jax.models.cache import LayerCache, PageCache, PagedAttention
from peagle_jax.models.layers import Attention, AttentionRows
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.parallel import partition, vocabulary
from peagle_jax.parallel.shares import vocabulary_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a drafter: the rows of a call, with tokens shifted by one.

    Row j of sequence b is slot `start[b] + j`. Rows `j < num_real[b]` are real; the last real row
    holds the newest token.
    """

    tokens: jax.Array  # [B, T] int32: row j holds the token at position start + j + 1
    taps: jax.Array  # [B, T, A*D]: tapped target states at position start + j
    num_real: jax.Array  # [B] int32
    start: jax.Array  # [B] int32
    page_table: jax.Array  # [B, W] int32
    slots: jax.Array  # [B] int32, the engine's slots
    keys: jax.Array  # [B] request keys
    temperature: jax.Array | None  # [B] float32; None: all are 0


class Proposal(NamedTuple):
    """Drafts of B sequences.

    Attributes:
      tokens: [B, J] int32, target ids.
      probs: [B, J, V] float32, their distributions; None: each is certain.
    """

    tokens: jax.Array
    probs: jax.Array | None


class Drafter(Protocol):
    """A source of drafts. A dataclass and a pytree: arrays are leaves, the rest is static.

    `dataclasses.replace(drafter, num_draft=K)` is the same drafter with another K.
    """

    num_draft: int

    def propose(
        self, target, inputs: DraftInputs, cache: list[LayerCache]
    ) -> tuple[Proposal, list[LayerCache]]:
        """Drafts after the newest token, `num_draft` (at least 1) per sequence; the updated
        cache."""

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]) -> list[LayerCache]:
        """The cache after the real rows as `propose` leaves it there, without drafts: K = 0.

        A drafter without a cache needs no such method. The cache then holds every position of the
        text, so later rounds draft as well as before.
        """


Sampling = Literal["argmax", "sample"]


def _choose(
    head: DraftHead, logits, positions, inputs: DraftInputs, sampling: Sampling
) -> Proposal:
    """Drafts from logits [B, J, Vd]; `positions` [B, J] are the positions of the drafted tokens."""

    def best() -> jax.Array:
        return head.to_target_ids(vocabulary.argmax(logits).astype(jnp.int32))

    def drawn() -> Proposal:
        probs = probabilities(logits, inputs.temperature[:, None])
        ids = sample_rows(probs, _keys(inputs, positions))
        return Proposal(head.to_target_ids(ids), _of_target(head, probs))

    return _drawn_or_best(best, drawn, head.config.vocab_size, inputs, sampling)


def _of_target(head: DraftHead, probs: jax.Array) -> jax.Array:
    """Probabilities [..., Vd] of draft ids as those of target ids."""
    if head.d2t is None:
        return probs
    probs = vocabulary.whole(probs, head.config.draft_vocab_size)
    target_ids = head.to_target_ids(jnp.arange(probs.shape[-1]))
    wide = jnp.zeros((*probs.shape[:-1], head.config.vocab_size), probs.dtype)
    return vocabulary.columns(wide.at[..., target_ids].set(probs))


def _drawn_or_best(
    best: Callable[[], jax.Array],
    drawn: Callable[[], Proposal],
    vocab_size: int,
    inputs: DraftInputs,
    sampling: Sampling,
) -> Proposal:
    """Drafts `drawn` if some request of the batch has a temperature, else the `best` ones [B, J],
    of which verification needs no law."""
    if sampling == "argmax" or inputs.temperature is None:
        return Proposal(best(), None)

    def without_law() -> Proposal:
        tokens = best()
        width = vocabulary_rows(vocab_size, partition.size())
        return Proposal(tokens, jnp.zeros((*tokens.shape, width), jnp.float32))

    some = jnp.any(inputs.temperature > 0).astype(jnp.int32)
    return partition.switch(some, [without_law, drawn])


def _keys(inputs: DraftInputs, positions: jax.Array) -> jax.Array:
    """Keys [B, J] of the drafts at `positions` [B, J]."""
    return draft_keys(inputs.keys, positions, inputs.start + inputs.num_real)


def candidate_scores(
    head: DraftHead, target, out: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Candidates of J drafts and how well each follows each of those before, by the head's
    selector.

    Args:
      out: [B, J, D], output of the layers; logits: [B, J, Vd].
    Returns:
      (draft ids [B, J, C], scores [B, J, C, C] of candidate b, the last axis, after candidate a).
    """
    ids, at = candidates(logits, head.config.draft_vocab_size)
    return ids, at[..., None, :] + head.edges(target, out, ids)


class Scored(NamedTuple):
    """Candidates of J drafts, see `candidate_scores`."""

    ids: jax.Array  # [B, J, C] int32, draft ids
    values: jax.Array  # [B, J, C] float32, the head's logits
    scores: jax.Array  # [B, J, C, C] float32
    taken: jax.Array  # [B, J] int32, the best given those before

    @classmethod
    def of(cls, ids: jax.Array, values: jax.Array, edges: jax.Array) -> Self:
        """With the edges [B, J, C, C] that a selector adds."""
        scores = values[..., None, :] + edges
        with partition.over(1):  # all devices have all candidates
            return cls(ids, values, scores, walk(jnp.argmax(scores, axis=-1).astype(jnp.int32)))


def _scored(head: DraftHead, target, tables: Tables | None, out, logits) -> Scored:
    """Candidates of logits [B, J, Vd].

    Args:
      tables: of `DraftHead.tables`; None: the products of the edges are computed here.
      out: [B, J or more, D], the layers' output.
    """
    J = logits.shape[1]
    ids, values = candidates(logits, head.config.draft_vocab_size)
    if tables is None:
        return Scored.of(ids, values, head.edges(target, out[:, :J], ids))
    states = head.selector.hidden(head.norm(out), out_dtype=jnp.float32)[:, :J]
    return Scored.of(ids, values, head.selector.scale * table_edges(tables, ids, states))


def _select(
    head: DraftHead,
    scored: Scored,
    logits: jax.Array,
    positions,
    inputs: DraftInputs,
    sampling: Sampling,
) -> Proposal:
    """Drafts that the head's selector chooses, see `_choose`.

    A drawn draft may also be none of the candidates: at a temperature the tokens beyond them have
    a share of the law, which would be lost.
    """
    ids = head.to_target_ids(scored.ids)
    chosen = lambda taken: jnp.take_along_axis(ids, taken[..., None], axis=-1)[..., 0]

    def drawn() -> Proposal:
        keys = jax.vmap(jax.vmap(jax.random.split))(_keys(inputs, positions))
        probs = probabilities(logits, inputs.temperature[:, None])
        ones = jnp.ones(ids.shape, probs.dtype)
        is_candidate = vocabulary.scattered(scored.ids, ones, head.config.draft_vocab_size) > 0
        others = jnp.where(is_candidate, 0.0, probs)
        other = head.to_target_ids(sample_rows(others, keys[..., 0]))
        # Not 1 - the sum of the others, which may round to less than nothing.
        shares = vocabulary.total(jnp.stack([probs - others, others]))
        with partition.over(1):  # all devices have all candidates
            taken, laws = sampled_walk(
                scored.scores, scored.values, tuple(shares), inputs.temperature, keys[..., 1]
            )
        num = ids.shape[-1]
        tokens = jnp.where(taken < num, chosen(jnp.minimum(taken, num - 1)), other)
        law = vocabulary.scattered(ids, laws, head.config.vocab_size) + _of_target(head, others)
        return Proposal(tokens, law)

    best = lambda: chosen(scored.taken)
    return _drawn_or_best(best, drawn, head.config.vocab_size, inputs, sampling)


def _absorb(head: DraftHead, target, inputs: DraftInputs, cache: list[LayerCache]):
    """`Drafter.absorb` of a head. XLA drops what only the unused output needs: the last layer's
    MLP."""
    positions = inputs.start[:, None] + jnp.arange(inputs.tokens.shape[1])
    attend = PagedAttention(inputs.page_table, inputs.slots, positions)
    hidden = head.fuse(inputs.taps)
    return head(target, inputs.tokens, hidden, positions, cache, attend)[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParallelDrafter:
    """P-EAGLE: one pass over [T real rows | J-1 mask rows] (docs/algorithm.md, "One round").

    `mask_state` is `fuse(mask_hidden)`, computed once by `make_drafter`. With `selects` the head's
    selector chooses the drafts, on one device with its `tables`.
    """

    head: DraftHead
    mask_state: jax.Array  # [D]
    num_draft: int = field(metadata=dict(static=True))
    sampling: Sampling = field(metadata=dict(static=True))
    selects: bool = field(default=False, metadata=dict(static=True))
    tables: Tables | None = None

    def propose(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        """Example: T = 4, J = 3 and num_real = 2 give the rows [real, real, mask, mask, pad, pad].

        Row 1 holds the newest token and predicts draft 1; rows 2 and 3 predict drafts 2 and 3.
        Padding rows are mask rows after the chain: causal attention hides them from the rows
        before, and the next round overwrites their keys and values. The last row is repeated where
        products would pad.
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
        if self.selects:
            scored = _scored(self.head, target, self.tables, out, logits)
            proposal = _select(self.head, scored, logits, drafted_at, inputs, self.sampling)
        else:
            proposal = _choose(self.head, logits, drafted_at, inputs, self.sampling)
        return proposal, cache

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        return _absorb(self.head, target, inputs, cache)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AutoregressiveDrafter:
    """EAGLE-3: one pass over the real rows, then J-1 passes of one row (docs/algorithm.md, "One
    round")."""

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


@dataclass(frozen=True)
class PagedBlocks:
    """`block_head.BlockAttend` over pages: of each sequence the rows [num_real of the context | T
    of the block | padding] at positions `start` and up.

    One call writes their keys and values, as a round of P-EAGLE writes its mask rows: those of the
    block are stale when it is over, and the next call overwrites them before any row reads them.
    """

    inputs: DraftInputs
    num_rows: int  # T, 0 for the context alone

    def __call__(self, attention: Attention, is_causal: bool, context, x, cache):
        inputs, T = self.inputs, self.num_rows
        (B, C, _), num_real = context.shape, inputs.num_real[:, None]
        rows = jnp.minimum(jnp.arange(whole_rows(B, C + T)), C + T - 1)
        positions = inputs.start[:, None] + rows
        if T:
            pad = ((0, 0), (0, len(rows) - C), (0, 0))
            own = jnp.broadcast_to(jnp.clip(rows - num_real, 0, T - 1), positions.shape)
            own = jnp.take_along_axis(x, own[..., None], axis=1)
            is_context = (rows < num_real)[..., None]
            context = jnp.where(is_context, jnp.pad(context, pad, mode="edge"), own)
        else:
            context = jnp.take(context, rows, axis=1)
        config = attention.config
        angles = rope_angles(config.rope, config.head_dim, positions)
        paged = PagedAttention(inputs.page_table, inputs.slots, positions)
        q, cache = paged.write(AttentionRows(attention, context, angles), cache)
        if not T:
            return None, cache
        at = num_real + jnp.arange(T)
        q = jnp.take_along_axis(q, at[..., None, None], axis=1)
        seen, window = inputs.start[:, None] + at, config.window
        if not is_causal:
            # All rows see what the last one sees, and the window reaches back from the first one.
            seen = jnp.broadcast_to(seen[:, -1:], seen.shape)
            window = None if window is None else window + T
        if isinstance(cache, PageCache):  # keys past the page table are not written
            seen = jnp.minimum(seen, inputs.page_table.shape[1] * cache.k.shape[1] - 1)
        scale = config.head_dim**-0.5
        out = replace(paged, positions=seen).read(q, cache, window=window, scale=scale, sinks=None)
        return out.reshape(B, T, -1), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockDrafter:
    """DFlash: one pass over the newest token and masks, which see the context and each other.

    With `selects` the head's selector chooses the drafts.
    """

    head: BlockHead
    num_draft: int = field(metadata=dict(static=True))
    sampling: Sampling = field(metadata=dict(static=True))
    selects: bool = field(default=False, metadata=dict(static=True))

    def propose(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        """Example: K = 3 and num_real = 2 give the block [x_c, mask, mask, mask] at positions c ..
        c+3, c = start + 2; the row at c+i predicts x_{c+i}. A head that drafts from the newest
        token has the block [x_c, mask, mask], whose row at c+i predicts x_{c+i+1}. More masks
        follow if the head was trained with more, see `DrafterConfig.block_rows`."""
        head, K = self.head, self.num_draft
        last = jnp.maximum(inputs.num_real[:, None] - 1, 0)
        newest = jnp.take_along_axis(inputs.tokens, last, axis=1)  # [B, 1]
        T, first = head.config.block_rows(K), int(not head.config.block.drafts_from_newest)
        masks = jnp.full((len(newest), T - 1), head.config.mask_token_id, jnp.int32)
        tokens = jnp.concatenate([newest, masks], axis=1)
        attend = PagedBlocks(inputs, T)
        out, cache = head(target, tokens, head.context(inputs.taps), cache, attend)
        out = out[:, first : first + K]
        logits = head.logits(target, out)
        positions = inputs.start[:, None] + last + 2 + jnp.arange(K)
        if self.selects:
            scored = self._scored(newest[:, 0], out, logits)
            return _select(head, scored, logits, positions, inputs, self.sampling), cache
        if head.markov_before is None:
            return _choose(head, logits, positions, inputs, self.sampling), cache
        proposals, before = [], newest
        for i in range(K):
            at = slice(i, i + 1)
            given = head.after_token(logits[:, at], before)
            proposals.append(_choose(head, given, positions[:, at], inputs, self.sampling))
            before = proposals[-1].tokens
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *proposals), cache

    def _scored(self, newest, out, logits) -> Scored:
        """As `_scored`, by a `selector.TableSelector`."""
        ids, values = candidates(logits, self.head.config.draft_vocab_size)
        return Scored.of(ids, values, self.head.selector(newest, self.head.norm(out), ids))

    def absorb(self, target, inputs: DraftInputs, cache: list[LayerCache]):
        context, attend = self.head.context(inputs.taps), PagedBlocks(inputs, 0)
        layers = zip(self.head.layers, cache, strict=True)
        return [attend(layer.attention, False, context, None, each)[1] for layer, each in layers]


def absorbed(drafter: Drafter, target, inputs: DraftInputs, cache: list) -> list:
    """`Drafter.absorb`, or the cache as it is."""
    return drafter.absorb(target, inputs, cache) if hasattr(drafter, "absorb") else cache


def with_num_draft(drafter: Drafter | None, num_draft: int) -> Drafter | None:
    """The drafter with this number of drafts: as many as the host counts for the call."""
    if drafter is None or drafter.num_draft == num_draft:
        return drafter
    return replace(drafter, num_draft=num_draft)


def make_drafter(
    head: DraftHead, num_draft: int, sampling: Sampling, *, selector: bool = True, target=None
) -> Drafter:
    """The drafter of a head, by its config's `method`. `selector` False ignores the head's
    selector.

    Call it again after the weights change: it computes P-EAGLE's `mask_state` once, and with a
    `target` the selector's tables, 2 Vd r numbers. Without them each round multiplies what its
    edges need, as several devices do.
    """
    selects = selector and head.selector is not None
    if isinstance(head, BlockHead):
        return BlockDrafter(head, num_draft, sampling, selects)
    if head.config.method == "eagle3":
        return AutoregressiveDrafter(head, num_draft, sampling)
    mask_state = head.fuse(head.mask_hidden[...][None])[0]
    tables = head.tables(target) if selects and target is not None else None
    return ParallelDrafter(head, mask_state, num_draft, sampling, selects, tables)
