"""Log-probabilities of texts under a target, as its engine reports them, with gradients.

The forward pass is the engine's: modules, kernels and pages of prefill. On GPUs with kernels its
numbers are meant to be the bits of `SamplingParams(logprobs=0)`; on a CPU they agree up to
rounding, because XLA orders sums by the shape of a program. Kernels that write to pages have no
derivative. The backward pass computes the same function by the references, with dense attention,
anew: it stores nothing of the forward pass.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from peagle_jax.errors import ConfigError
from peagle_jax.method.prompt_scores import score_prompt
from peagle_jax.models import Decoder
from peagle_jax.models.layers import AttentionRows
from peagle_jax.training.passes import served_pass

_DIFFERENTIABLE = (jnp.float32, jnp.bfloat16, jnp.float16)


def logprobs(
    target: Decoder,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Log-probabilities of the tokens of answers, at temperature 1, differentiable in `target`.

    They are those that an engine of one device reports, see the module. Gradients need weights
    that are not quantised.

    Args:
      target: the model, not shared by several devices.
      tokens: [B, T] int32, prompts with their answers; anything behind them.
      prompt_lengths: [B] int32, at least 1.
      lengths: [B] int32, tokens of prompt and answer; None: T.
    Returns:
      [B, T] float32: place t has that of `tokens[:, t]` after those before it; 0 outside of the
      answers.

    Raises:
      ConfigError: an array has another shape or no whole numbers; in the backward pass, weights are
        quantised.
    """
    tokens, prompt_lengths = jnp.asarray(tokens), jnp.asarray(prompt_lengths)
    _check("tokens", tokens, tokens.ndim == 2 and tokens.size > 0, "[B, T]")
    B, T = tokens.shape
    _check("prompt_lengths", prompt_lengths, prompt_lengths.shape == (B,), f"[{B}]")
    place = jnp.arange(T)
    is_answer = (place > 0) & (place >= prompt_lengths[:, None])
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        _check("lengths", lengths, lengths.shape == (B,), f"[{B}]")
        is_answer &= place < lengths[:, None]
    scores = _scores(target, tokens.astype(jnp.int32))
    return jnp.where(is_answer, jnp.pad(scores[:, :-1], ((0, 0), (1, 0))), 0.0)


def _check(name: str, array: jax.Array, fits: bool, shape: str) -> None:
    if not fits or not jnp.issubdtype(array.dtype, jnp.integer):
        rule = f"{array.dtype} {list(array.shape)} must be whole numbers {shape}"
        raise ConfigError.of(name, rule)


@jax.jit
@jax.custom_vjp
def _scores(target: Decoder, tokens: jax.Array) -> jax.Array:
    """[B, T] float32, of the token after each place."""
    # Behind the barriers the pass compiles alone, whatever the caller does with its numbers.
    target, tokens = jax.lax.optimization_barrier((target, tokens))
    with dispatch.as_served():
        hidden, _ = served_pass(target, tokens)
        return jax.lax.optimization_barrier(_scored(target, tokens, hidden))


def _scored(target: Decoder, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    return score_prompt(target.unembed, hidden, following, 0).logprobs


def _differentiable(target: Decoder, tokens: jax.Array) -> jax.Array:
    """`_scores` by the references and dense attention."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = target(tokens, places, [None] * target.config.num_layers, _dense)
    return _scored(target, tokens, hidden)


def _backward(saved, g):
    if any(leaf.dtype not in _DIFFERENTIABLE for leaf in jax.tree.leaves(saved[0])):
        raise ConfigError("quantised weights have no gradients: give those they were made from")
    target, tokens = jax.lax.optimization_barrier(saved)
    with dispatch.references():
        return jax.vjp(lambda target: _differentiable(target, tokens), target)[1](g)[0], None


_scores_rule = _scores.__wrapped__
_scores_rule.defvjp(lambda *given: (_scores_rule(*given), given), _backward)


def _dense(rows: AttentionRows, cache: None, *, window: int | None, scale: float, sinks):
    """`layers.Attend` over whole texts. A sink is one more key, whose score is a bias."""
    q, k, v = rows.heads()
    T, N = q.shape[1:3]
    behind = jnp.arange(T)[:, None] - jnp.arange(T)
    mask, bias = (behind >= 0) & (behind < (window or T)), None
    if sinks is not None:
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)
        bias = jnp.zeros((1, N, T, T + 1), q.dtype).at[..., -1].set(sinks[:, None].astype(q.dtype))
    return jax.nn.dot_product_attention(q, k, v, bias, mask[None, None], scale=scale), None
