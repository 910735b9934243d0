"""Names of the compiled programs of an engine. No jax here."""

from typing import NamedTuple

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.prefill_shapes import PrefillShape, full_shape

PREFILL, SCORED_PREFILL, CONTROLS, RINGS = "prefill", "prefill with scores", "controls", "rings"
"""Keys of the programs besides the rounds. The key of a round's program is its `RoundShape`."""


def prefill_key(shape: PrefillShape, config: EngineConfig) -> str:
    """Key of the prefill program of a shape."""
    is_full = shape == full_shape(config)
    return PREFILL if is_full else f"{PREFILL} of {shape.rows} x {shape.chunk} tokens"


class GreedyRound(NamedTuple):
    """Key of the program of a round without branches, see `DecodeCall.is_greedy`."""

    shape: RoundShape

    @property
    def size(self) -> int:
        """The batch bucket."""
        return self.shape.size


Key = RoundShape | GreedyRound | str


def spelled(key: Key | None) -> str:
    """A program's name for people; of None "the list of programs"."""
    if key is None:
        return "the list of programs"
    if isinstance(key, str):
        return f"the program of {key}"
    kind, shape = ("greedy ", key.shape) if isinstance(key, GreedyRound) else ("", key)
    return f"the program of {kind}rounds of {shape.size} requests with {shape.num_draft} drafts"
