"""Weights in the loss: lower for repeated text and for drafts that are rarely reached."""

import jax
import jax.numpy as jnp

REPEAT = 8
"""Number of last tokens that must have occurred earlier for a position to count as a repeat."""
PACE_FLOOR = 0.5


def repeated(tokens: jax.Array, width: int = REPEAT) -> jax.Array:
    """Positions [B, S] whose last `width` tokens also end at an earlier position of their text."""
    same = tokens[:, :, None] == tokens[:, None, :]  # [B, S, S]
    S = tokens.shape[1]
    run = same
    for i in range(1, width):
        run &= jnp.pad(same[:, : S - i, : S - i], ((0, 0), (i, 0), (i, 0)))
    return (run & jnp.tri(S, k=-1, dtype=bool)).any(axis=-1)


def anchor_weights(tokens: jax.Array, repeat_weight: float) -> jax.Array:
    """Float32 [B, S]: `repeat_weight` where the newest token x_{a+1} ends a repeat, else 1."""
    seen = jnp.pad(repeated(tokens)[:, 1:], ((0, 0), (0, 1)))
    return jnp.where(seen, repeat_weight, 1.0)


def pace_weights(probs: list[jax.Array], used: list[jax.Array]) -> list[jax.Array]:
    """D-PACE (arXiv 2605.18810): weights of the depths of each anchor, by the head's confidence.

    Let q_i be the head's probability of the true token at depth i, and p_i = 0.5 q_i + 0.5. The
    weight of depth j is the sum over m >= j of p_0 p_1 .. p_m: its share of the chain's expected
    tokens. For a text dropped at some depth, the rest of the sum is the mean over the texts that
    are kept.

    Args:
      probs, used: by depth, [B_d, S] with B_0 >= B_1 >= ...; text b is row b of every block.
    Returns:
      float32 weights shaped like `probs`; 0 where not used.
    """
    paces = [
        jnp.where(u, PACE_FLOOR * q + 1 - PACE_FLOOR, 0.0) for q, u in zip(probs, used, strict=True)
    ]
    rest = jnp.zeros_like(paces[-1])  # of the sum, relative to the product so far
    rests = []
    for pace, mask in zip(reversed(paces), reversed(used), strict=True):
        below = mask[: len(rest)]
        mean = jnp.where(below, rest, 0).sum() / jnp.maximum(below.sum(), 1)
        rest = jnp.concatenate(
            [rest, jnp.broadcast_to(mean, (len(pace) - len(rest), pace.shape[1]))]
        )
        rest = pace * (1 + rest)
        rests.insert(0, rest)
    weights, product = [], jnp.ones_like(paces[0])
    for pace, rest in zip(paces, rests, strict=True):
        weights.append(jax.lax.stop_gradient(product[: len(rest)] * rest))
        product = product[: len(pace)] * pace
    return weights
