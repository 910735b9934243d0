"""Sampling parameters from a client's message: what is wrong is named as the client spells it."""

from collections.abc import Mapping

from peagle_jax import ConfigError, SamplingParams
from serving.errors import invalid

MAX_STOPS = 16
MAX_STOP_IDS = 256


def sampling_params(spelling: Mapping[str, str], **values) -> SamplingParams:
    """`SamplingParams(**values)`.

    Args:
      spelling: the client's names of the fields, where they differ from ours.
    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    named = lambda name: spelling.get(name, name)
    for name, most in (("stop", MAX_STOPS), ("stop_ids", MAX_STOP_IDS)):
        if len(values.get(name, ())) > most:
            raise invalid(named(name), f"more than {most}")
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        name, _, _ = str(error).partition("=")
        raise invalid(named(name), str(error)) from error


def refuse_unless_neutral(field: str, value: object, neutral: tuple, what: str) -> None:
    """Refuses what this server does not do, unless the value asks for nothing.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    if value not in neutral:
        raise invalid(field, f"{what} is not supported; leave it out")
