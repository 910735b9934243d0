"""What llguidance would enforce only in part of a JSON schema. It is refused by its place, or
enforced otherwise.

numbers         llguidance holds float64, and reads some decimals a unit beside the nearest float64
minProperties   a free key (of `additionalProperties` or `patternProperties`) may be written twice
named keys      a free key may spell the name of another with escapes: {"a": 1, "\\u0061": 2}
formats         llguidance admits dates, times and hosts that validators refuse
"""

import itertools
import re
from collections.abc import Iterator
from decimal import Decimal

from peagle_jax.errors import ConfigError

_LARGEST = 2**53
_INCLUSIVE = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values map names to schemas."""
_NO_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can write as \\u00.. only."""
_DEEPEST = 200
"""References and parts within each other, which llguidance follows on its stack."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""
_ESCAPES = 'nrbtf\\"'
"""Escapes of texts and keys in a schema whose free keys could be named ones: all but \\u."""
SPACING = {"whitespace_pattern": " "}
"""At most one space between two tokens of JSON. Without a bound some models write white space
without end."""
_SPACES = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
_DATE = (
    "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"  # of a year above 0000
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTES}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_MINUTES})"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,%d}[a-zA-Z0-9])?"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = rf"{_ATOM}{{1,64}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{1,2}}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"(?:{_DATE})T{_TIME}",
    # At most 253 characters.
    "hostname": rf"{_LABEL % 61}(?:\.{_LABEL % 61}){{0,2}}|{_LABEL % 28}(?:\.{_LABEL % 28}){{3,7}}",
    "email": rf"(?:{_LOCAL})@(?:{_LABEL % 28}\.){{1,5}}[a-zA-Z]{{2,24}}",
}
"""Formats by a regular expression whose texts all validators take. llguidance has the others."""


def enforceable(schema: dict | bool) -> dict | bool:
    """The schema as llguidance enforces all of it, with `SPACING` unless it says otherwise. Formats
    in it change.

    Raises:
      ConfigError: a part of it cannot be enforced. The message has its place; `field` is
        "structured".
    """
    if schema is False:
        return schema
    schema = {} if schema is True else schema
    may_repeat, control, depths = False, None, {}
    for place, part, under, is_value in list(_parts(schema)):
        is_map = under in _BY_NAME
        if _depth(part, schema, depths) > _DEEPEST:
            raise RecursionError
        control = _check_numbers(place, part, is_map) or control
        _check_min_properties(place, part)
        may_repeat |= bool(part.get("patternProperties")) or (
            bool(part.get("properties")) and _has_free_keys(part)
        )
        if not is_map and not is_value:
            _write_format(part)
    style = schema.get("x-guidance", {})
    if not isinstance(style, dict):
        return schema
    if not any(name in style for name in _SPACES):
        style = SPACING | style
    if may_repeat and control is not None:
        rule = "a control character that needs \\u cannot be enforced beside free keys"
        raise _refused(control, f"{rule}; set additionalProperties to false")
    if may_repeat:
        style = style | {"json_allowed_escapes": _ESCAPES}
    return schema | {"x-guidance": style}


def _write_format(part: dict) -> None:
    """Replaces a format by its pattern in `_FORMATS`."""
    name = part.get("format")
    if not isinstance(name, str) or name not in _FORMATS:
        return
    pattern = {"pattern": f"^(?:{_FORMATS[name]})$"}
    del part["format"]
    others = part.get("allOf", [])
    if isinstance(others, list):  # llguidance refuses all else
        part["allOf"] = [*others, pattern]


def _refused(place: str, rule: str) -> ConfigError:
    return ConfigError.of("structured", f"{place}: {rule}")


def _parts(schema: dict) -> Iterator[tuple[str, dict, str, bool]]:
    """All objects of a schema: place, content, the keyword that it is under, and whether it is part
    of a value; a name under a keyword is "*".

    Values such as defaults are among them, because references may point anywhere.
    """
    waiting: list[tuple[str, object, str, bool]] = [("#", schema, "", False)]
    while waiting:
        place, part, under, is_value = waiting.pop()
        if isinstance(part, dict):
            yield place, part, under, is_value
            for key, value in part.items():
                if under in _BY_NAME:
                    waiting.append((f"{place}/{key}", value, f"{under}/*", is_value))
                else:
                    waiting.append((f"{place}/{key}", value, key, is_value or key in _VALUES))
        elif isinstance(part, list):
            waiting += (
                (f"{place}/{number}", one, under, is_value) for number, one in enumerate(part)
            )


def _check_numbers(place: str, part: dict, is_map: bool) -> str | None:
    """Refuses numbers that are not exact. Returns the place of a constant that JSON writes with \\u
    only."""
    control = None
    for key, most in itertools.chain(
        ((key, _LARGEST) for key in _INCLUSIVE), ((key, _LARGEST - 1) for key in _EXCLUSIVE)
    ):
        _check_number(f"{place}/{key}", part.get(key), most, "leave the limit out")
    for key in ("const", "enum"):
        if key not in part or (is_map and isinstance(part[key], dict)):
            continue
        waiting = [part[key]]
        while waiting:
            value = waiting.pop()
            _check_number(f"{place}/{key}", value, _LARGEST, "use a string instead")
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, str) and _NO_ESCAPE.search(value):
                control = f"{place}/{key}"
    return control


def _check_number(place: str, value: object, most: int, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if abs(value) > most:
        rule = f"{value} cannot be held exactly: numbers are float64, so exact up to 2^53 only"
        raise _refused(place, f"{rule}; {advice}")
    if isinstance(value, float) and not _is_read_exactly(value):
        raise _refused(place, f"{value!r} has too many digits to be held exactly; give fewer")


def _is_read_exactly(value: float) -> bool:
    """Whether llguidance's reader of JSON finds this float64: it multiplies or divides all digits
    once."""
    _, digits, exponent = Decimal(repr(abs(value))).as_tuple()
    significand = float(int("".join(map(str, digits))))
    if abs(exponent) > 308:
        return False
    power = float(f"1e{abs(exponent)}")
    return (significand * power if exponent >= 0 else significand / power) == abs(value)


def _depth(part: object, root: dict, known: dict[int, int]) -> int:
    """How many references and parts in place follow from a part; `known` has those of others."""
    if not isinstance(part, dict):
        return 0
    if id(part) not in known:
        known[id(part)] = 0  # for a reference within itself
        below = [_target(part.get("$ref"), root)]
        for key in ("allOf", "anyOf", "oneOf"):
            below += part[key] if isinstance(part.get(key), list) else []
        known[id(part)] = 1 + max(_depth(one, root, known) for one in below)
    return known[id(part)]


def _target(reference: object, root: dict) -> object:
    """The part that a reference such as "#/$defs/Point" names."""
    value: object = root if isinstance(reference, str) and reference.startswith("#") else None
    for name in reference.split("/")[1:] if value else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _has_free_keys(part: dict) -> bool:
    """Whether an object may have keys that its schema does not name."""
    return part.get("additionalProperties") is not False or bool(part.get("patternProperties"))


def _check_min_properties(place: str, part: dict) -> None:
    least, required = part.get("minProperties"), part.get("required")
    types = part.get("type", "object")  # one, or a list of them
    may_be_object = "object" in types if isinstance(types, list) else types == "object"
    if not isinstance(least, int) or not may_be_object or not _has_free_keys(part):
        return
    names = {one for one in required if isinstance(one, str)} if isinstance(required, list) else ()
    if least > len(names) + 1:
        rule = f"{least} cannot be enforced, because a free key may be written twice"
        advice = "list the keys in required beside it, or set additionalProperties to false"
        raise _refused(f"{place}/minProperties", f"{rule}; {advice}")
