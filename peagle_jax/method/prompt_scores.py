"""Log-probabilities of a prompt's tokens, from the hidden states of a prefill call."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.method.sampling import at_tokens
from peagle_jax.parallel import vocabulary

BLOCK = 64
"""Rows whose logits are in memory at once."""


class PromptScores(NamedTuple):
    """Scores of the token after each row of a prefill call; padding rows are undefined.

    The law is the model's at temperature 1, without sampling controls.
    """

    logprobs: jax.Array  # [R, T] float32
    ranks: jax.Array  # [R, T] int32, 1 for the most likely token
    top_ids: jax.Array  # [R, T, n] int32
    top_logprobs: jax.Array  # [R, T, n] float32


def score_prompt(
    unembed: Callable[[jax.Array], jax.Array], hidden: jax.Array, following: jax.Array, num_top: int
) -> PromptScores:
    """Scores the token after each row.

    Args:
      unembed: hidden states [..., D] -> logits [..., V].
      hidden: [R, T, D].
      following: [R, T] int32, the token after each row.
      num_top: n, most likely tokens to report.
    """

    @jax.checkpoint  # a backward pass would keep the log-probabilities of all rows
    def score(rows, tokens):
        logprobs = vocabulary.log_softmax(unembed(rows))
        chosen = at_tokens(logprobs, tokens)
        larger = (logprobs > chosen[..., None]).astype(jnp.int32)
        ranks = 1 + vocabulary.total(larger)
        return PromptScores(chosen, ranks, *vocabulary.top(logprobs, num_top))

    R, T, D = hidden.shape
    size = min(BLOCK, R * T)
    padding = -(R * T) % size
    rows = jnp.pad(hidden.reshape(R * T, D), ((0, padding), (0, 0))).reshape(-1, size, D)
    tokens = jnp.pad(following.reshape(R * T), (0, padding)).reshape(-1, size)
    scores = lax.map(lambda args: score(*args), (rows, tokens))
    flat = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # also without alternatives
    unpad = lambda x: flat(x)[: R * T].reshape(R, T, *x.shape[2:])
    return jax.tree.map(unpad, scores)
