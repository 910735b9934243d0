"""The parts of the state that a round reads only. They are operands beside the state that it
consumes."""

from dataclasses import replace

from peagle_jax.engine.device.device_calls import GreedyRound, Key
from peagle_jax.method import step
from peagle_jax.method.adjust import Controls
from peagle_jax.method.plan import RequestParams, greedy_only

Kept = tuple[RequestParams, Controls | None]
"""Parts of the state that a round reads only: the parameters, and controls without counts."""


def split(state: step.State, key: Key) -> tuple[step.State, Kept]:
    """The parts of the state that a round writes, and those that it only reads and does not return.

    Each array that a program returns costs the host a microsecond.
    """
    if isinstance(key, GreedyRound):
        kept = greedy_only(state.params), None
    else:
        kept = state.params, state.controls._replace(counts=None)
    return without(state, kept), kept


def without(state: step.State, kept: Kept) -> step.State:
    """The state without `kept`."""
    controls = None if kept[1] is None else _counts_only(state.controls)
    return replace(state, params=None, controls=controls)


def join(written: step.State, kept: Kept) -> step.State:
    """The state from its parts."""
    params, controls = kept
    if written.controls is not None:
        controls = controls._replace(counts=written.controls.counts)
    return replace(written, params=params, controls=controls)


def _counts_only(controls: Controls) -> Controls:
    return Controls(**dict.fromkeys(Controls._fields) | {"counts": controls.counts})
