"""The selector: chooses each parallel draft in view of the draft before it.

A P-EAGLE head predicts all drafts of a round at once, so draft d does not see draft d-1. The right token is
often among the head's candidates and not at their top. The selector scores pairs of candidates: with a
the draft at d-1 and b among the C = 16 most likely tokens at d,

    S_d(b | a) = logit_d(b) + edge_d(a, b)
    edge_d(a, b) = < out silu(previous e(a) + hidden h_d), u(b) > / sqrt(D)

where e is the embedding, h_d the head's normed state, and u(b) the row of b in the head's unembedding. Draft 1
sees the token before it, so it has no edge. Draft d is the argmax of S_d, or a draw from softmax(S_d / T).

All C x C pairs of all drafts are scored in parallel. So is the best b for every a, with one Gumbel noise
per b when drafts are sampled: what remains of the walk from draft to draft is J-1 lookups of one number.
The law of draft d given the drafts before it is softmax(S_d / T) over C tokens, and verification gets this
law. So the output keeps the target's law whatever the selector has learned.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.layers import INIT_STD, Linear
from peagle_jax.parallel import partition, vocabulary
from peagle_jax.sampling import probabilities, sample_rows

CANDIDATES = 16
"""C, tokens of a position among which the selector chooses."""
_FEW = 32_768
"""Most values that `lax.top_k` takes."""
_DIRECT = 512
"""Most values whose ranks are counted pair by pair."""


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
        # [..., C, D] x [D, rank]: narrower than the product of both sides in D.
        keys = jnp.einsum("...cd,dr->...cr", columns, self.out.weight[...])
        edges = jnp.einsum(
            "...ar,...cr->...ac",
            jax.nn.silu(inner),
            keys,
            precision=_precision(keys),
            preferred_element_type=jnp.float32,
        )
        return edges / math.sqrt(columns.shape[-1])


def _precision(x: jax.Array):
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def top(values: jax.Array, count: int) -> jax.Array:
    """Indices [..., count] of the largest of `values` [..., V], largest first. V is at least `count`.

    The first is that of `jnp.argmax`. NaN counts as -inf. Ranks are counted instead of sorted, since a
    CUDA graph may not contain a sort: first among tiles by their maximum, then inside the best tiles,
    which hold the largest values.
    """
    values = jnp.where(values == values, values, -jnp.inf)
    # XLA compiles ranks of few thousand values for minutes, and sorts these fast enough.
    return jax.lax.top_k(values, count)[1] if values.shape[-1] <= _FEW else _in_tiles(values, count)


def candidates(logits: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Ids [..., C] int32 and logits [..., C] of the likeliest tokens, largest first, as `top` orders them.

    With several devices each finds the likeliest of its columns [..., w], and all choose among these.
    """
    count, width = min(CANDIDATES, vocab_size), logits.shape[-1]
    ids = top(logits, min(count, width))
    values = jnp.take_along_axis(logits, ids, axis=-1)
    if (n := partition.size()) == 1:
        return ids, values
    ids = ids + partition.rank() * width
    ids, values = (vocabulary.whole(x, n * x.shape[-1]) for x in (ids, values))
    best = top(values, count)  # ties: the lower rank comes first, and has the lower ids
    return tuple(jnp.take_along_axis(x, best, axis=-1) for x in (ids, values))


def _in_tiles(values: jax.Array, count: int) -> jax.Array:
    """`top` of many values without NaN."""
    V = values.shape[-1]
    if V <= _DIRECT:
        return _ranked(values, count)
    width = max(count, 1 << math.ceil(math.log2(V / _DIRECT)))
    pad = [(0, 0)] * (values.ndim - 1) + [(0, -V % width)]
    tiles = jnp.pad(values, pad, constant_values=-jnp.inf).reshape(*values.shape[:-1], -1, width)
    best = _in_tiles(tiles.max(-1), count)
    inner = jnp.take_along_axis(tiles, best[..., None], axis=-2)
    at = best[..., None] * width + jnp.arange(width)
    flat = lambda x: x.reshape(*x.shape[:-2], count * width)
    chosen = jnp.take_along_axis(flat(at), _in_tiles(flat(inner), count), axis=-1)
    return jnp.minimum(chosen, V - 1)  # padding is chosen only where all values are -inf


def _ranked(values: jax.Array, count: int) -> jax.Array:
    """`top` of few values: the rank of a value is the number of those before it."""
    index = jnp.arange(values.shape[-1])
    mine, other = values[..., :, None], values[..., None, :]
    before = (other > mine) | ((other == mine) & (index < index[:, None]))
    rank = before.sum(-1, dtype=jnp.int32)
    is_rank = rank[..., None, :] == jnp.arange(count)[:, None]
    return jnp.where(is_rank, index, 0).sum(-1, dtype=jnp.int32)


def walk(best: jax.Array) -> jax.Array:
    """Follows the candidates of the positions, each given the one before.

    Args:
      best: [B, J, C] int32, the candidate to take after each candidate of the position before; of the first
        position column 0 is used.
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
    scores: jax.Array, temperature: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws each candidate from softmax(S / T), given the one before.

    The noise of a candidate is the same after every a. Only one a is taken, so the draw has the law of its
    row.

    Args:
      scores: [B, J, C, C], S of candidate b (last axis) after candidate a.
      temperature: [B]; 0 takes the argmax.
      keys: [B, J] random keys.
    Returns:
      (the candidates taken [B, J] int32, their laws given those before [B, J, C] float32).
    """
    laws = probabilities(scores, temperature[:, None, None])
    taken = walk(sample_rows(laws, jnp.broadcast_to(keys[..., None], laws.shape[:-1])))
    return taken, rows_of(laws, taken)
