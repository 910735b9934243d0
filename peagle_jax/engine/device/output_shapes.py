"""Shapes and dtypes of operands and of what the programs report, before they exist."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.prefill_shapes import PrefillShape
from peagle_jax.method.prompt_scores import PromptScores
from peagle_jax.method.step import StepOutput


def prefill_output(config: EngineConfig, shape: PrefillShape, *, scores: bool) -> StepOutput:
    """Output of a prefill call; `scores`: with log-probabilities of prompts."""
    output = _output(shape.rows, 1, config.num_draft, config.max_logprobs)
    if not scores:
        return output
    rows = tuple(shape)
    top = (*rows, config.max_logprobs)
    prompt = PromptScores(
        logprobs=_floats(*rows), ranks=_ints(*rows), top_ids=_ints(*top), top_logprobs=_floats(*top)
    )
    return replace(output, prompt=prompt)


def round_output(config: EngineConfig, shape: RoundShape, *, is_greedy: bool) -> StepOutput:
    """Output of a round, or of all rounds of a call for greedy requests, then with a leading
    axis."""
    sizes = (shape.size, shape.num_draft + 1, shape.num_draft)
    output = _output(*sizes, config.max_logprobs)
    if not is_greedy:
        return output
    output = replace(output, logprobs=None, top_ids=None, top_logprobs=None)
    several = lambda shape: jax.ShapeDtypeStruct((config.repeat, *shape.shape), shape.dtype)
    return jax.tree.map(several, output) if config.repeat > 1 else output


def _output(rows: int, T: int, num_draft: int, n: int) -> StepOutput:
    """For `T` tokens, with n alternatives each, and `num_draft` drafts of each of `rows` slots."""
    return StepOutput(
        packed=_ints(rows, T + 1),
        drafts=_ints(rows, num_draft),
        logprobs=_floats(rows, T),
        top_ids=_ints(rows, T, n),
        top_logprobs=_floats(rows, T, n),
    )


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def spec_of(leaf) -> jax.ShapeDtypeStruct:
    """The shape of an operand. Of a weight that is given as a shape, with its layout, it is
    that."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):  # one device: the default one
        sharding = None
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf), sharding=sharding)
