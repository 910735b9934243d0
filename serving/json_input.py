"""Parses clients' JSON: bounded in size before parsing, and without duplicate keys."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from serving.errors import invalid
from serving.limits import Limits

MAX_VALUES = 65_536
"""Most numbers, texts, lists and objects of a request, token ids of its prompts aside."""

MAX_SMALL_BYTES = 1 << 16
"""Most bytes of JSON within a gRPC message: variables of a chat template, sampling parameters."""

_MAX_DIGITS = 1000
"""Maximum number of characters of an integer."""

_PIECE = 1 << 16  # bytes


def parse_object(content: bytes, *, field: str, limits: Limits, max_ids: int = 0) -> dict:
    """Parses a JSON object.

    json.loads holds the GIL until it returns: 5 million empty objects (15 MiB) take 2.3 s and 375
    MB. Such a text is refused before it is parsed, by a count of its brackets and commas.

    Args:
      field: name of the text in error messages.
      max_ids: values that are allowed in addition to `MAX_VALUES`.

    Raises:
      ServiceError: INVALID_ARGUMENT if the text is not a JSON object, has too many values or too
        much nesting, or has an object with duplicate keys.
    """
    check_sizes(content, field=field, limits=limits, max_ids=max_ids)
    try:
        # From bytes json.loads would also accept UTF-16 and UTF-32, which `sizes` cannot count.
        value = json.loads(
            str(content, "utf-8"),
            object_pairs_hook=partial(_object, field),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value


def check_sizes(
    content: bytes, *, field: str, limits: Limits, max_ids: int = 0, num_before: int = 0
) -> int:
    """Checks the size of a JSON text before it is parsed.

    Args:
      num_before: values of other texts that count towards the same limit.

    Returns:
      The number of values, those before included.

    Raises:
      ServiceError: INVALID_ARGUMENT; the text has too many values or too much nesting.
    """
    size = Size(0, 0, 0)
    for size in sizes(content):
        _check_size(size, field, limits, MAX_VALUES + max_ids - num_before)
    return num_before + size.num_values


def parse_small_object(content: bytes, *, field: str, limits: Limits) -> dict:
    """`parse_object` for code in the event loop: refuses more than `MAX_SMALL_BYTES`.

    Raises:
      ServiceError: INVALID_ARGUMENT, as `parse_object` and for more bytes.
    """
    if len(content) > MAX_SMALL_BYTES:
        raise invalid(field, f"{len(content)} bytes are more than {MAX_SMALL_BYTES}")
    return parse_object(content, field=field, limits=limits)


@dataclass(frozen=True)
class Size:
    """Upper bound of the values in a JSON text, the objects among them, and the depth
    of nesting.
    """

    num_values: int
    num_objects: int
    depth: int


def sizes(content: bytes) -> Iterator[Size]:
    """Running size of a text after each piece of `_PIECE` bytes; the last one is that of the whole
    text.

    Counting takes about 1 ms per piece, mostly without the GIL, so a caller stops at the first size
    above its limit. In a text that is not JSON the size is correct up to the mistake.
    """
    num_values, num_objects, depth, deepest, is_in_string = 1, 0, 0, 0, False
    start = 0
    while start < len(content):
        piece = content[start : start + _PIECE]
        if _num_trailing_backslashes(piece) % 2:
            piece = content[start : start + _PIECE + 1]  # keeps an escape in one piece
        start += len(piece)
        text = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        in_string = np.logical_xor.accumulate(text == ord('"')) ^ is_in_string
        is_in_string = bool(in_string[-1]) if len(in_string) else is_in_string
        marks = text[~in_string]
        is_object = marks == ord("{")
        is_opening = is_object | (marks == ord("["))
        is_closing = (marks == ord("}")) | (marks == ord("]"))
        depths = depth + np.cumsum(
            is_opening.view(np.int8) - is_closing.view(np.int8), dtype=np.int32
        )
        deepest = max(deepest, int(depths.max(initial=0)))
        depth = int(depths[-1]) if len(depths) else depth
        # Each comma and each opening bracket precedes a value; an empty list counts as one with a
        # value.
        num_values += int(np.count_nonzero(is_opening) + np.count_nonzero(marks == ord(",")))
        num_objects += int(np.count_nonzero(is_object))
        yield Size(num_values, num_objects, deepest)


def _num_trailing_backslashes(piece: bytes) -> int:
    return len(piece) - len(piece.rstrip(b"\\"))


def _check_size(size: Size, field: str, limits: Limits, max_values: int) -> None:
    if size.depth > limits.max_json_depth:
        rule = f"lists and objects {size.depth} deep are more than {limits.max_json_depth}"
        raise invalid(field, rule)
    # An object costs as much time as ten numbers. A chat has one for each message and each part.
    for number, what, most in (
        (size.num_values, "values", max_values),
        (size.num_objects, "objects", 4 * limits.max_messages),
    ):
        if number > most:
            rule = f"{number} {what} are more than the {most} that this server takes"
            raise invalid(field, rule)


def _object(field: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise invalid(field, f"the key {duplicate!r} stands in an object twice; leave one out")
    return content


def _finite(text: str) -> float:
    """A number. One above the largest float would become infinity, which no answer can repeat."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _integer(text: str) -> int:
    """An integer. Python takes quadratic time to read one of many digits."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"{text[:20]}... has more than {_MAX_DIGITS} digits")
    return int(text)


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")
