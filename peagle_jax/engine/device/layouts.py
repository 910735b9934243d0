"""Weights in the memory layouts of the compiled round, on TPUs.

An array has the default layout of its shape. If a program has another one, libtpu copies the whole
array in each call: 1.2 GB for the embedding of GPT-OSS, whose width is no multiple of 128. So the
round of the largest batch is compiled with free layouts, the weights move once into those that it
chose, and all other programs are compiled for weights that lie so.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax.experimental.layout import Format, Layout

from pallas_kernels import dispatch
from peagle_jax.engine.host.calls import RoundShape

PLATFORMS = ("tpu",)
"""Platforms (`pallas_kernels.dispatch.platform`) with such layouts. Programs for GPUs and CPUs have
the default ones."""


def lower_free(function: Callable, weights, *others, donate: Sequence[int], sharding=None):
    """`function` lowered for shapes, with free layouts of its first operand, the weights.

    The layouts of the compiled program are in `input_formats[0][0]`.

    Args:
      donate: numbers of the operands that are consumed.
      sharding: device of all operands; None: the default one.
    """
    placed = (Format(Layout.AUTO, sharding), *[sharding] * len(others))
    jitted = jax.jit(function, in_shardings=placed, donate_argnums=tuple(donate), keep_unused=True)
    return jitted.lower(weights, *others)


def move(weights: list[jax.Array], round_of: Callable, shape: RoundShape, others: Sequence) -> None:
    """Moves the weights of the list into the layouts of the round of `shape`, one after the other.

    Args:
      round_of: the jitted round, a function of the weights and the others; it consumes operands 1
        and 4.
      others: shapes of its other operands.
    """
    function = partial(round_of.__wrapped__, num_draft=shape.num_draft, repeat=1)
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights]
    program = lower_free(function, bare, *others, donate=(1, 4)).compile()
    for i, wanted in enumerate(program.input_formats[0][0]):
        if weights[i].format != wanted:
            weights[i] = jax.device_put(weights[i], wanted)


def moved_as(weight: jax.Array, before: jax.Array) -> jax.Array:
    """The weight in the layout of the one before it."""
    return jax.device_put(weight, before.format) if dispatch.platform() in PLATFORMS else weight


def shapes(weights: Sequence[jax.Array]) -> Sequence:
    """The weights, or on `PLATFORMS` their shapes and layouts, to lower a program for."""
    if dispatch.platform() not in PLATFORMS:
        return weights
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format) for x in weights]
