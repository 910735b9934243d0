"""The parts of the state that a round reads only. They are operands beside the state that it consumes."""

from dataclasses import replace

from peagle_jax import step
from peagle_jax.adjust import Controls
from peagle_jax.plan import RequestParams, greedy_only

Kept = tuple[RequestParams, Controls | None]
"""Parts of the state that a round reads only: the parameters, and controls without counts."""


def kept_by(state: step.State, is_greedy: bool) -> Kept:
    """What a round reads of the state and does not write: each result costs the host a microsecond."""
    if is_greedy:
        return greedy_only(state.params), None
    return state.params, state.controls._replace(counts=None)


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
