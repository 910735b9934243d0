"""The shapes of prefill calls: few tokens take a program with little padding, and a long prompt
alone fills a call."""

from collections.abc import Sequence
from typing import NamedTuple

from peagle_jax.config import EngineConfig

_PARTS = 4  # a short program has this part of `prefill_chunk`
_LEAST = 16  # tokens that a short program has at least


class PrefillShape(NamedTuple):
    """Shape of a prefill call: its program is compiled for it."""

    rows: int  # R, prompts
    chunk: int  # T, tokens of each

    @property
    def num_tokens(self) -> int:
        """Tokens that the device computes, padding included."""
        return self.rows * self.chunk

    def advance(self, remaining: Sequence[int]) -> int:
        """Tokens that one call prefills of prompts with so many `remaining` ones."""
        return sum(min(number, self.chunk) for number in remaining[: self.rows])


def full_shape(config: EngineConfig) -> PrefillShape:
    """The largest call: `prefill_rows` prompts with `prefill_chunk` tokens each."""
    return PrefillShape(config.prefill_rows, config.prefill_chunk)


def prefill_shapes(config: EngineConfig) -> tuple[PrefillShape, ...]:
    """Shapes of all prefill calls, by their tokens; the last one is `full_shape`.

    With `small_prefills` there are calls of one prompt and of short chunks besides, and with
    `long_prefills` one of as many tokens of one prompt as the full call has of all.
    """
    full = full_shape(config)
    if not config.small_prefills:
        return (full,)
    longest = min(full.num_tokens, config.max_model_len)
    longer = [PrefillShape(1, longest)] if config.long_prefills and longest > full.chunk else []
    short = max(_LEAST, full.chunk // _PARTS)
    shapes = {
        PrefillShape(rows, min(chunk, full.chunk))
        for rows in (1, full.rows)
        for chunk in (short, full.chunk)
    }
    return (*sorted({*shapes, *longer} - {full}, key=lambda one: (one.num_tokens, one)), full)


def choose_shape(
    shapes: Sequence[PrefillShape], remaining: Sequence[int], may_be_long: bool = True
) -> PrefillShape:
    """The shape with the fewest tokens that prefills as many of the prompts' tokens as the last one
    of `shapes`.

    A prompt alone takes a longer chunk if it fills more than half of it: then one call replaces
    three or more.

    Args:
      shapes: as of `prefill_shapes`, or some of them.
      remaining: for each prompt the number of tokens that it lacks.
      may_be_long: whether nobody else would wait for a longer chunk.
    """
    full = shapes[-1]
    if len(remaining) == 1 and may_be_long:
        longer = (shape for shape in shapes if full.chunk < shape.chunk < 2 * remaining[0])
        if (shape := next(longer, None)) is not None:
            return shape
    most = full.advance(remaining)
    usual = (shape for shape in shapes if shape.chunk <= full.chunk)
    return next(shape for shape in usual if shape.advance(remaining) == most)
