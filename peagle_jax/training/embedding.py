"""An embedding lookup whose gradient is a matrix product with one-hot rows.

The gradient of a lookup adds one row per token to the table. A scatter-add serialises on repeated
tokens (all mask rows of P-EAGLE have the same token), and its order of summation on a GPU is not
deterministic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.models.layers import Embed

_CHUNK = 8192


@jax.custom_vjp
def lookup(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """`weight[tokens]`: [V, D], [...] -> [..., D]."""
    return weight[tokens]


def _lookup_fwd(weight, tokens):
    return weight[tokens], (weight, tokens)


def _lookup_bwd(saved, g):
    weight, tokens = saved
    V, D = weight.shape
    tokens, g = tokens.reshape(-1), g.reshape(-1, D)
    chunk = min(_CHUNK, len(tokens))
    pad = -len(tokens) % chunk
    # Padding ids are outside the table, so their one-hot rows are zero.
    tokens = jnp.pad(tokens, (0, pad), constant_values=V).reshape(-1, chunk)
    g = jnp.pad(g, ((0, pad), (0, 0))).reshape(-1, chunk, D)
    precision = jax.lax.Precision.HIGHEST if g.dtype == jnp.float32 else None

    def step(total, piece):
        ids, rows = piece
        one_hot = (ids == jnp.arange(V)[:, None]).astype(rows.dtype)
        return total + jnp.matmul(
            one_hot, rows, precision=precision, preferred_element_type=jnp.float32
        ), None

    total, _ = jax.lax.scan(step, jnp.zeros((V, D), jnp.float32), (tokens, g))
    return total.astype(weight.dtype), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


class MaskedRows(NamedTuple):
    """Tokens [B, S] followed by `num_masked` rows of one token."""

    tokens: jax.Array
    num_masked: int
    mask_id: int


class TrainedEmbed(Embed):
    """`layers.Embed` with the gradient of `lookup`; it uses the weight of the given `Embed`."""

    def __init__(self, embed: Embed):
        self.weight = embed.weight

    def __call__(self, tokens: jax.Array | MaskedRows) -> jax.Array:
        if not isinstance(tokens, MaskedRows):
            return lookup(self.weight[...], tokens)
        real = lookup(self.weight[...], tokens.tokens)
        masked = self.weight[tokens.mask_id]
        return jnp.concatenate(
            [real, jnp.broadcast_to(masked, (tokens.num_masked, *real.shape[1:]))]
        )
