"""The calls of an engine's device programs, as data: what a process needs to repeat them on its own
devices.

Programs are named by keys, plans and masks are the bits that `transfer.pack` makes of them. A
process that performs the same calls in the same order on equal weights holds equal state
(docs/parallel.md). No jax here.
"""

from typing import NamedTuple

import numpy as np

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


class Run(NamedTuple):
    """A prefill call or a round."""

    key: Key
    plan: np.ndarray | None  # [n] int32; None: that of the last call of this program
    mask: np.ndarray | None  # [n] int32; None: no row is constrained


class WriteControls(NamedTuple):
    """Writes the sampling controls of one request."""

    controls: np.ndarray  # [n] int32, a `plan.ControlsPlan`


class CopyRings(NamedTuple):
    """Copies the rings of all layers from one row to another."""

    source: int
    target: int


class Compile(NamedTuple):
    """Compiles programs. It may overlap with later calls; one that needs a program waits for it."""

    keys: tuple[Key, ...]


DeviceCall = Run | WriteControls | CopyRings | Compile
