"""What llguidance would enforce only in part of a JSON schema. It is refused by its place, or
enforced otherwise.

numbers         llguidance holds float64, and reads some decimals a unit beside the nearest float64
minProperties   a free key (of `additionalProperties` or `patternProperties`) may be written twice
named keys      a free key may spell the name of another with escapes: {"a": 1, "\\u0061": 2}
optional keys   objects with very many exceed a limit of the parser, and only when a text is written
"""

import itertools
import re
from collections.abc import Iterator
from decimal import Decimal

from peagle_jax.engine.schema_objects import MOST_OPTIONAL, Objects, has_free_keys, may_be_object
from peagle_jax.errors import ConfigError

_LARGEST = 2**53
_INCLUSIVE = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values map names to schemas."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$defs/*", "definitions/*")
"""Where schemas are part of another: their objects are counted there."""
_NO_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can write as \\u00.. only."""
_ESCAPES = 'nrbtf\\"'
"""Escapes of texts and keys in a schema whose free keys could be named ones: all but \\u."""


def enforceable(schema: dict | bool) -> dict | bool:
    """The schema as llguidance enforces all of it.

    Raises:
      ConfigError: a part of it cannot be enforced. The message has its place; `field` is
        "structured".
    """
    if isinstance(schema, bool):
        return schema
    objects, may_repeat, control = Objects(schema), False, None
    for place, part, under in _parts(schema):
        is_map = under in _BY_NAME
        control = _check_numbers(place, part, is_map) or control
        _check_min_properties(place, part)
        number = None if is_map or under in _IN_PLACE else objects.too_many(part)
        if number is not None:
            rule = f"{number} optional properties are too many, those of alternatives included"
            raise _refused(place, f"{rule}: {MOST_OPTIONAL}")
        may_repeat |= bool(part.get("patternProperties")) or (
            bool(part.get("properties")) and has_free_keys(part)
        )
    style = schema.get("x-guidance", {})
    if not may_repeat or not isinstance(style, dict):
        return schema
    if control is not None:
        rule = "a control character that needs \\u cannot be enforced beside free keys"
        raise _refused(control, f"{rule}; set additionalProperties to false")
    return schema | {"x-guidance": style | {"json_allowed_escapes": _ESCAPES}}


def _refused(place: str, rule: str) -> ConfigError:
    return ConfigError.of("structured", f"{place}: {rule}")


def _parts(schema: dict) -> Iterator[tuple[str, dict, str]]:
    """All objects of a schema: place, content, and the keyword that it is under; a name under a
    keyword is "*".

    Values such as defaults are among them, because references may point anywhere.
    """
    waiting: list[tuple[str, object, str]] = [("#", schema, "")]
    while waiting:
        place, part, under = waiting.pop()
        if isinstance(part, dict):
            yield place, part, under
            is_map = under in _BY_NAME
            waiting += (
                (f"{place}/{key}", value, f"{under}/*" if is_map else key)
                for key, value in part.items()
            )
        elif isinstance(part, list):
            waiting += ((f"{place}/{number}", one, under) for number, one in enumerate(part))


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


def _check_min_properties(place: str, part: dict) -> None:
    least, required = part.get("minProperties"), part.get("required")
    if not isinstance(least, int) or not may_be_object(part) or not has_free_keys(part):
        return
    names = {one for one in required if isinstance(one, str)} if isinstance(required, list) else ()
    if least > len(names) + 1:
        rule = f"{least} cannot be enforced, because a free key may be written twice"
        advice = "list the keys in required beside it, or set additionalProperties to false"
        raise _refused(f"{place}/minProperties", f"{rule}; {advice}")
