"""Types of options: how their values are written, and the rule of each."""

import ipaddress
import math
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticKnownError

from peagle_jax.config import ConfigError


def num_bytes(text: str) -> int:
    """Bytes of a size such as "8GiB", "500MB" or "1073741824".

    Raises:
      ConfigError: `text` is not a size.
    """
    units = {"": 1, "b": 1} | {
        f"{letter}{suffix}": base**power
        for power, letter in enumerate("kmgt", start=1)
        for suffix, base in (("b", 1000), ("ib", 1024))
    }
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    is_size = match is not None and match[2] in units
    size = float(match[1]) * units[match[2]] if is_size else math.inf
    if math.isinf(size):  # no size, or one of more than 308 digits
        raise ConfigError(f"{text!r} is not a size; write one as 8GiB or 500MB")
    return int(size)


def _rule(text: str, holds: Callable[..., bool]) -> AfterValidator:
    """A validator that refuses values for which `holds` is false."""

    def check(value):
        if not holds(value):
            raise ValueError(f"{value!r} must be {text}")
        return value

    return AfterValidator(check)


def _refuse_bool(value: object) -> object:
    # Without this check pydantic accepts true as the number 1.
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _check_size(text: str) -> str:
    num_bytes(text)
    return text


def _check_origins(text: str) -> str:
    """Origins as browsers send them, joined by commas."""
    origins = [one.strip().lower() for one in text.split(",")]
    for one in origins:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+|null", one):
            raise ValueError(f"{one!r} must be an origin, such as https://chat.example:8443, or *")
    return ",".join(origins)


Text = Annotated[str, _rule("left out or given", bool)]
Size = Annotated[Text, AfterValidator(_check_size)]
Url = Annotated[
    Text,
    _rule(
        "a URL that begins with http:// or https://",
        lambda url: url.startswith(("http://", "https://")),
    ),
]
Origins = Annotated[Text, AfterValidator(_check_origins)]
Int = Annotated[int, BeforeValidator(_refuse_bool)]
Count = Annotated[Int, _rule("at least 1", lambda count: count >= 1)]
Mebibytes = Annotated[Int, _rule("between 1 and 1024", lambda size: 1 <= size <= 1024)]
Port = Annotated[Int, _rule("a port or 0", lambda port: 0 <= port < 65536)]
PortOrNone = Annotated[Int, _rule("a port, 0 or -1", lambda port: -1 <= port < 65536)]
Seconds = Annotated[
    float,
    BeforeValidator(_refuse_bool),
    _rule("0 or more seconds", lambda seconds: 0 <= seconds < math.inf),
]
MoreSeconds = Annotated[Seconds, _rule("above 0", lambda seconds: seconds > 0)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def describe(error: ValidationError) -> str:
    """The first mistake of `error` as one line."""
    first: ErrorDetails = error.errors(include_url=False)[0]
    rule = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return str(rule)
    name = first["loc"][0]
    if first["type"] == "extra_forbidden":
        return f"there is no option {name!r}"
    return f"{name}={first['input']!r}: {first['msg']}" if rule is None else f"{name}={rule}"
