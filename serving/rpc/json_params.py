"""Reads sampling parameters from the JSON object that Triton's language models accept."""

from collections.abc import Callable
from dataclasses import dataclass

from peagle_jax.options import Kind, options_of
from peagle_jax.sampling_params import MAX_BIAS, SamplingParams
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
    n = 1
    for key, value in given.items():
        field = f"{FIELD}.{key}"
        if key in _NEUTRAL:
            refuse_unless_neutral(field, _plain(value), _NEUTRAL[key], key)
        elif key not in _READERS:
            raise invalid(field, f"is not known; there are {', '.join(_READERS)}")
        elif value is None:
            continue
        elif key == "n":
            n = _int(field, value)
        else:
            values[_OURS[key].name] = _READERS[key](field, value)
    if values.get("top_k") == -1:  # vLLM also writes -1 for all tokens
        values["top_k"] = 0
    return Sampling(params=sampling_params(SPELLING, limits, **values), n=n)


def _int(field: str, value: object) -> int:
    # Triton's own example writes numbers as strings.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError
        number = int(value)
    except ValueError:
        raise invalid(field, f"{value!r} must be a whole number") from None
    if abs(number) > _LARGEST:
        raise invalid(field, f"{number} is too large")
    return number


def _float(field: str, value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise invalid(field, f"{value!r} must be a number") from None


def _bool(field: str, value: object) -> bool:
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise invalid(field, f"{value!r} must be true or false")
    return plain


def _strings(field: str, value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise invalid(field, "must be a string or a list of strings")
    return tuple(listed)


def _ints(field: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise invalid(field, "must be a list of token ids")
    return tuple(_int(field, one) for one in value)


def _biases(field: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid(field, "must be an object of token ids and numbers")
    if len(value) > MAX_BIAS:
        raise invalid(field, f"{len(value)} tokens are more than {MAX_BIAS}")
    return {_int(field, token): _float(field, bias) for token, bias in value.items()}


def _plain(value: object) -> object:
    """A value for comparison: strings of numbers and truth values are converted, lists become tuples."""
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


_KINDS: dict[Kind, Callable] = {
    **{"int": _int, "float": _float, "bool": _bool},
    **{"texts": _strings, "ints": _ints, "biases": _biases},
}
_NEUTRAL = {
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "length_penalty": (1, None),
    "early_stopping": (False, None),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "guided_decoding": (None,),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
}
"""Parameters of vLLM that this server does not support, with the values that have no effect."""
_OURS = {spelled(name): one for name, one in options_of(SamplingParams).items()}
_READERS: dict[str, Callable] = {
    key: _KINDS[one.kind] for key, one in _OURS.items() if key not in _NEUTRAL
} | {"n": _int}
SPELLING = {one.name: f"{FIELD}.{key}" for key, one in _OURS.items()} | {"n": f"{FIELD}.n"}
"""The client's names of the fields."""
