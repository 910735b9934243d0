"""The parts of the state that a round reads only. They are operands beside the state that it
consumes: each array that a program returns costs the host a microsecond."""

from dataclasses import replace

from peagle_jax.method import step
from peagle_jax.method.adjust import Controls
from peagle_jax.method.plan import RequestParams

ReadOnly = tuple[RequestParams, Controls | None]
"""The parameters of all slots, and their controls without counts."""


def without(state: step.State, kept: ReadOnly) -> step.State:
    """The state without `kept`."""
    controls = None
    if kept[1] is not None:
        nothing = dict.fromkeys(Controls._fields)
        controls = Controls(**nothing | {"counts": state.controls.counts})
    return replace(state, params=None, controls=controls)


def join(written: step.State, kept: ReadOnly) -> step.State:
    """The state from its parts."""
    params, controls = kept
    if written.controls is not None:
        controls = controls._replace(counts=written.controls.counts)
    return replace(written, params=params, controls=controls)
