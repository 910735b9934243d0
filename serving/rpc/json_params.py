"""Reads sampling parameters from the JSON object that Triton's language models accept."""

from dataclasses import dataclass

from peagle_jax.errors import ConfigError
from peagle_jax.options import Option, converted, options_of
from peagle_jax.sampling_params import SamplingParams
from serving.errors import invalid
from serving.json_input import parse_small_object
from serving.limits import Limits
from serving.params import refuse_unless_neutral, sampling_params, spelled

FIELD = "sampling_parameters"
_LARGEST = 2**63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters and the number of sequences."""

    params: SamplingParams
    n: int


def read_sampling(text: bytes, limits: Limits, *, max_tokens: int) -> Sampling:
    """Reads the parameters of a JSON object; an empty text is an empty object.

    Args:
      max_tokens: the default.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the key.
    """
    given = parse_small_object(text, field=FIELD, limits=limits) if text.strip() else {}
    values: dict = dict(max_tokens=max_tokens, temperature=1.0)
    for key, value in given.items():
        field = f"{FIELD}.{key}"
        if key in _NEUTRAL:
            refuse_unless_neutral(field, _plain(value), _NEUTRAL[key], key)
        elif key not in _OPTIONS:
            raise invalid(field, f"is not known; there are {', '.join(_OPTIONS)}")
        elif value is not None:
            # Triton's own example writes numbers as strings.
            values[_OPTIONS[key].name] = _read(_OPTIONS[key], field, value)
    n = values.pop("n", 1)
    if values.get("top_k") == -1:  # vLLM also writes -1 for all tokens
        values["top_k"] = 0
    return Sampling(params=sampling_params(SPELLING, limits, **values), n=n)


def _read(one: Option, field: str, value: object) -> object:
    if one.kind == "bool" and str(value).lower() not in ("true", "false"):
        raise invalid(field, "must be true or false")
    try:
        found = converted(one, value)
    except ConfigError as error:
        raise invalid(field, str(error)) from None
    if one.kind == "int" and abs(found) > _LARGEST:
        raise invalid(field, f"{found} is too large")
    return found


def _plain(value: object) -> object:
    """A value for comparison: strings of numbers and truth values are converted, lists become
    tuples.
    """
    if isinstance(value, list | dict):
        return tuple(value)
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return float(value)
    except ValueError:
        return value


_NEUTRAL = {
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "length_penalty": (1, None),
    "early_stopping": (False, None),
    "logprobs": (None,),
    "logprobs_mode": (None,),
    "prompt_logprobs": (None,),
    "guided_decoding": (None,),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
}
"""Parameters of vLLM that this server does not support, with the values that have no effect."""
_OPTIONS = {
    spelled(name): one for name, one in options_of(SamplingParams).items() if name not in _NEUTRAL
}
_OPTIONS["n"] = _OPTIONS["max_tokens"]._replace(name="n")
SPELLING = {one.name: f"{FIELD}.{key}" for key, one in _OPTIONS.items()}
"""The client's names of the fields."""
