"""The parts of the state that a round reads only. They are operands beside the state that it
consumes: each array that a program returns costs the host a microsecond."""

from dataclasses import replace

from peagle_jax.method import step
from peagle_jax.method.adjust import Controls
from peagle_jax.method.plan import RequestParams

ReadOnly = tuple[RequestParams, Controls | None]
"""The parameters of all slots, and their controls without those that rounds write."""

_WRITTEN = ("counts",)
"""Fields of `Controls` that a round writes; what it writes to others is lost."""


def read_only(state: step.State) -> ReadOnly:
    """The parts of the state that a round with controls reads only."""
    return state.params, state.controls._replace(**dict.fromkeys(_WRITTEN))


def without(state: step.State, kept: ReadOnly) -> step.State:
    """The state without `kept`."""
    controls = None
    if kept[1] is not None:
        nothing = dict.fromkeys(set(Controls._fields) - set(_WRITTEN))
        controls = state.controls._replace(**nothing)
    return replace(state, params=None, controls=controls)


def join(written: step.State, kept: ReadOnly) -> step.State:
    """The state from its parts."""
    params, controls = kept
    if written.controls is not None:
        own = {name: getattr(written.controls, name) for name in _WRITTEN}
        controls = controls._replace(**own)
    return replace(written, params=params, controls=controls)
