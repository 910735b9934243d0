"""Makes sampling parameters from a client's message; errors name the field as the
client spells it.
"""

from collections.abc import Mapping, Sequence

from peagle_jax import ConfigError, SamplingParams
from peagle_jax.structured import Structured
from serving.errors import PromptTooLong, invalid
from serving.limits import Limits

_MAX_SALT = 256  # characters
SPELLING = {"stop_ids": "stop_token_ids"}
"""Clients' names of the fields of `SamplingParams`, where they differ from ours."""


def spelled(name: str) -> str:
    """The clients' name of a field of `SamplingParams`."""
    return SPELLING.get(name, name)


def sampling_params(spelling: Mapping[str, str], limits: Limits, **values) -> SamplingParams:
    """`SamplingParams(**values)`.

    Args:
      spelling: the client's names of the fields, where they differ from ours.
      limits: limits of stop strings and stop ids; those of strings hold for bad words too.
      values: fields of `SamplingParams`; `stop` and `stop_ids` may be sequences of any type.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    named = lambda name: spelling.get(name, name)
    for name, most in (("stop", limits.max_stops), ("stop_ids", limits.max_stop_ids)):
        given = values.get(name, ())
        if len(given) > most:
            raise invalid(named(name), f"{len(given)} are more than {most}")
        values[name] = tuple(given)
    for name, what in (("stop", "stop string"), ("bad_words", "bad word")):
        for text in values.get(name, ()):
            if len(text) > limits.max_stop_chars:
                rule = (
                    f"{len(text)} characters are more than the {limits.max_stop_chars} of a {what}"
                )
                raise invalid(named(name), rule)
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        raise invalid(named(error.field), error.rule) from error


def cache_salt(given: str, *, field: str) -> str:
    """A client's salt of the prefix cache: requests with other salts share no cached prefix with
    it.

    Raises:
      ServiceError: INVALID_ARGUMENT; it is empty or too long.
    """
    if not 1 <= len(given) <= _MAX_SALT:
        raise invalid(field, f"{len(given)} characters; it must have 1 to {_MAX_SALT}")
    return given


def constraint(field: str, kind: str | None, value: object) -> Structured | None:
    """The constraint of a message.

    Args:
      field: the client's name of it.
      kind: name of a class method of `Structured`; None: there is none.
      value: its argument; for json_object whether the constraint is on.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    try:
        match kind:
            case None:
                return None
            case "json_object":
                return Structured.json_object() if value else None
        return getattr(Structured, kind)(value)
    except ConfigError as error:
        raise invalid(field, error.rule) from error


def prompt_ids(given: Sequence[int], *, field: str, max_model_len: int) -> list[int]:
    """Token ids of a prompt as a list. `Frontend.open` checks them against the vocabulary.

    Raises:
      ServiceError: INVALID_ARGUMENT; the prompt leaves no room for one token of output.
    """
    check_room(len(given), field=field, max_model_len=max_model_len)
    return list(given)


def check_room(num_tokens: int, *, field: str, max_model_len: int) -> None:
    """Refuses a prompt that leaves no room for one token of output.

    Raises:
      PromptTooLong: see `PromptTooLong`.
    """
    if num_tokens >= max_model_len:
        rule = f"{num_tokens} tokens leave no room for output"
        excess = f"{num_tokens} tokens > {max_model_len - 1}"
        raise PromptTooLong(field, rule, max_model_len=max_model_len, excess=excess)


def refuse_unless_neutral(field: str, value: object, neutral: tuple, what: str) -> None:
    """Refuses an option that this server does not support, unless its value has no effect.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    if value not in neutral:
        raise invalid(field, f"{what} is not supported; leave it out")
