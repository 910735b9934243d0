"""Sampling parameters of rows, for tests that call the step or its rules themselves."""

from peagle_jax.method.plan import RequestParams, idle_params


def request_params(rows: int, **changes) -> RequestParams:
    """Parameters of `rows` rows: neutral but for the changes, each one value or one for a row."""
    idle = idle_params(rows)
    for name, value in changes.items():
        getattr(idle, name)[:] = value
    return idle
