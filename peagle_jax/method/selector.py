"""The selector: chooses each parallel draft in view of the draft before it.

A P-EAGLE head predicts all drafts of a round at once, so draft d does not see draft d-1. The right
token is often among the head's candidates and not at their top. The selector scores pairs of
candidates: with a the draft at d-1 and b among the C = 16 most likely tokens at d,

    S_d(b | a) = logit_d(b) + edge_d(a, b)
    edge_d(a, b) = < out silu(previous e(a) + hidden h_d), u(b) > / sqrt(D)

where e is the embedding, h_d the head's normed state, and u(b) the row of b in the head's
unembedding. Draft 1 sees the token before it, so it has no edge. Draft d is the argmax of S_d, or a
draw: of the candidates by softmax(S_d / T), of all other tokens by the head's own law.

All C x C pairs of all drafts are scored in parallel. So is the best b for every a, with one Gumbel
noise per b when drafts are sampled: what remains of the walk from draft to draft is J-1 lookups of
one number. Verification gets the law of draft d given the drafts before it. So the output keeps the
target's law whatever the selector has learned.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import dispatch
from pallas_kernels.top.api import top
from peagle_jax.config import DrafterConfig
from peagle_jax.method.sampling import probabilities, sample_rows
from peagle_jax.models.layers import INIT_STD, Linear
from peagle_jax.parallel import partition, vocabulary

CANDIDATES = 16
"""C, tokens of a position among which the selector chooses."""
_CHUNK = 8192
"""Tokens whose rows of `Tables` are computed at once."""


class Tables(NamedTuple):
    """What the edges need of each token, by draft id. With the tables an edge needs no product in
    D."""

    before: jax.Array  # [Vd, r], `previous e(a)`
    after: jax.Array  # [Vd, r], `out^T u(b)`


class Selector(nnx.Module):
    """Weights of the edges. `out` starts at zero: an untrained selector changes no draft."""

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, rank = config.hidden_size, config.selector_rank
        init = dict(bias=False, dtype=dtype, rngs=rngs)
        self.previous = Linear(D, rank, std=INIT_STD, **init)
        self.hidden = Linear(D, rank, std=INIT_STD, **init)
        self.out = Linear(rank, D, std=0.0, **init)

    def __call__(self, embedded: jax.Array, hidden: jax.Array, columns: jax.Array) -> jax.Array:
        """Edges from candidates a of one position to candidates b of the next.

        Args:
          embedded: [..., A, D], embeddings of a.
          hidden: [..., D], the head's normed state at the position of b.
          columns: [..., C, D], rows of the unembedding of b.
        Returns:
          [..., A, C] float32.
        """
        inner = self.previous(embedded) + self.hidden(hidden)[..., None, :]
        keys = self.keys(columns)
        edges = jnp.einsum(
            "...ar,...cr->...ac",
            jax.nn.silu(inner),
            keys,
            precision=_precision(keys),
            preferred_element_type=jnp.float32,
        )
        return edges * self.scale

    @property
    def scale(self) -> float:
        """1 / sqrt(D)."""
        return 1 / math.sqrt(self.out.weight.shape[0])

    def keys(self, columns: jax.Array) -> jax.Array:
        """`out^T u(b)` of rows of the unembedding: [..., D] -> [..., r]."""
        # Narrower than the product of both sides of an edge in D.
        return jnp.einsum("...d,dr->...r", columns, self.out.weight[...])

    def tables(self, embed: Callable, unembedding: jax.Array) -> Tables:
        """The tables of all draft tokens, in the dtype of the weights.

        Args:
          embed: function from draft ids [n] to embeddings [n, D].
          unembedding: [Vd, D].
        """
        V = len(unembedding)
        ids = [jnp.arange(i, min(i + _CHUNK, V), dtype=jnp.int32) for i in range(0, V, _CHUNK)]
        product = partial(_product, self.previous, trace=dispatch.trace())
        before = jnp.concatenate([product(embed(chunk)) for chunk in ids])
        return Tables(before, self.keys(unembedding))


@partial(jax.jit, static_argnames="trace")
def _product(linear: Linear, x: jax.Array, *, trace: dispatch.Trace) -> jax.Array:
    # Op by op, a product with `column_tiles` would need gigabytes, and seconds after each update.
    return linear(x)


class TableSelector(nnx.Module):
    """The selector of DFlash2: its edges are products of rows of two tables, and draft 1 has edges
    from the token before it.

        edge_d(a, b) = < before[a] * hidden h_d, after[b] >
    """

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        V, rank = config.vocab_size, config.selector_rank
        table = lambda: nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (V, rank), dtype))
        self.before, self.after = table(), table()
        self.hidden = Linear(
            config.hidden_size, rank, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs
        )

    def __call__(self, newest: jax.Array, hidden: jax.Array, ids: jax.Array) -> jax.Array:
        """Edges from the candidates a of each position to those of the next, b.

        Args:
          newest: [B] int32, the token before the first draft.
          hidden: [B, J, D], the head's normed states.
          ids: [B, J, C] int32, candidates.
        Returns:
          [B, J, C, C] float32; of the first position all rows are equal.
        """
        first = jnp.broadcast_to(newest[:, None, None], ids[:, :1].shape)
        before = self.before[...][jnp.concatenate([first, ids[:, :-1]], axis=1)]
        return jnp.einsum(
            "...ar,...cr->...ac",
            before * self.hidden(hidden)[..., None, :],
            self.after[...][ids],
            precision=_precision(before),
            preferred_element_type=jnp.float32,
        )


def _precision(x: jax.Array):
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def candidates(logits: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Ids [..., C] int32 and logits [..., C] float32 of the likeliest tokens, largest first, as
    `top` orders them.

    With several devices each finds the likeliest of its columns [..., w], and all choose among
    these.
    """
    count, width = min(CANDIDATES, vocab_size), logits.shape[-1]
    ids, values = top(logits, min(count, width))
    if (n := partition.size()) == 1:
        return ids, values
    ids = ids + partition.rank() * width
    ids, values = (vocabulary.whole(x, n * x.shape[-1]) for x in (ids, values))
    best, values = top(values, count)  # ties: the lower rank comes first, and has the lower ids
    return jnp.take_along_axis(ids, best, axis=-1), values


def table_edges(tables: Tables, ids: jax.Array, states: jax.Array) -> jax.Array:
    """`Selector` from its tables, without its scale.

    Args:
      ids: [B, J, C] int32, candidates.
      states: [B, J, r] float32; those of draft 1 are not used.
    Returns:
      [B, J, C, C] float32; zeros of draft 1, which has no edges.
    """
    before = tables.before[ids[:, :-1]].astype(jnp.float32)
    after = tables.after[ids[:, 1:]].astype(jnp.float32)
    inner = jax.nn.silu(before + states[:, 1:, None])
    # Not an einsum: tiles of a product, and so its bits, may depend on the number of sequences.
    edges = jnp.sum(inner[:, :, :, None] * after[:, :, None], axis=-1)
    return jnp.pad(edges, ((0, 0), (1, 0), (0, 0), (0, 0)))


def walk(best: jax.Array) -> jax.Array:
    """Follows the candidates of the positions, each given the one before.

    Args:
      best: [B, J, C] int32, the candidate to take after each candidate of the position before; of
        the first position column 0 is used.
    Returns:
      [B, J] int32, the candidates taken.
    """
    taken = [best[:, 0, 0]]
    for following in jnp.moveaxis(best, 1, 0)[1:]:
        taken.append(jnp.take_along_axis(following, taken[-1][:, None], axis=1)[:, 0])
    return jnp.stack(taken, axis=1)


def rows_of(values: jax.Array, taken: jax.Array) -> jax.Array:
    """The rows of a walk: values [B, J, C, C] after each candidate, `taken` [B, J] -> [B, J, C]."""
    before = jnp.pad(taken[:, :-1], ((0, 0), (1, 0)))
    return jnp.take_along_axis(values, before[..., None, None], axis=2)[:, :, 0]


def sampled_walk(
    scores: jax.Array,
    values: jax.Array,
    shares: tuple[jax.Array, jax.Array],
    temperature: jax.Array,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draws each candidate from softmax(S / T), given the one before, or none of them.

    None has its chance under the head alone; after it the candidates have the head's own law. The
    noise of a candidate is the same after every a. Only one a is taken, so the draw has the law of
    its row.

    Args:
      scores: [B, J, C, C], S of candidate b (last axis) after candidate a.
      values: [B, J, C], the head's logits of the candidates.
      shares: [B, J] each, probability under the head of the candidates and of all others.
      temperature: [B]; 0 takes the argmax.
      keys: [B, J] random keys.
    Returns:
      (the candidates taken [B, J] int32, C for none of them; the laws of the candidates given those
      before [B, J, C] float32, with the candidates' share as sum).
    """
    own, others = (share[..., None, None] for share in shares)
    some = jnp.concatenate([scores, values[:, :, None]], axis=2)
    some = own * probabilities(some, temperature[:, None, None])
    none = jnp.broadcast_to(others, (*some.shape[:-1], 1))
    laws = jnp.concatenate([some, none], axis=-1)
    taken = walk(sample_rows(laws, jnp.broadcast_to(keys[..., None], laws.shape[:-1])))
    return taken, rows_of(some, taken)
