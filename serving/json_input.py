"""JSON that clients send: counted before it becomes objects, and without keys that stand there twice."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from serving.errors import invalid
from serving.limits import Limits

MAX_VALUES = 65_536
"""Numbers, texts, lists and objects that a request may hold beside the token ids of its prompts."""

MAX_SMALL_BYTES = 1 << 16
"""Of JSON within a gRPC message: variables of a chat template, sampling parameters."""

_PIECE = 1 << 16  # bytes


def parse_object(content: bytes, *, field: str, limits: Limits, max_ids: int = 0) -> dict:
    """The object that `content` holds.

    json.loads keeps Python's global lock to its end, so what would take it long is refused by a count of
    bytes: 5 million empty objects (15 MiB) take it 2.3 s and 375 MB.

    Args:
      field: what messages call it.
      max_ids: values that it may hold beyond `MAX_VALUES`.

    Raises:
      ServiceError: INVALID_ARGUMENT; it is no JSON object, it is too deep or holds too many values, or an
        object holds a key twice.
    """
    for size in sizes(content):
        _check_size(size, field, limits, MAX_VALUES + max_ids)
    try:
        # Bytes would be read as UTF-16 or UTF-32 too, of which the count knows nothing.
        found = json.loads(
            str(content, "utf-8"),
            object_pairs_hook=partial(_object, field),
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise invalid(field, "must be a JSON object")
    return found


def parse_small_object(content: bytes, *, field: str, limits: Limits) -> dict:
    """`parse_object` of at most `MAX_SMALL_BYTES`, for code that runs in the event loop.

    Raises:
      ServiceError: as `parse_object` does, and for more bytes.
    """
    if len(content) > MAX_SMALL_BYTES:
        raise invalid(field, f"{len(content)} bytes are more than {MAX_SMALL_BYTES}")
    return parse_object(content, field=field, limits=limits)


@dataclass(frozen=True)
class Size:
    """What a JSON text holds: values at most, objects among them, and how deep they lie."""

    num_values: int
    num_objects: int
    depth: int


def sizes(content: bytes) -> Iterator[Size]:
    """What the text holds up to the end of each piece of it; the last is the size of the whole.

    It counts bytes, mostly without Python's global lock, so a caller that stops at the first size above
    its limit has spent about a millisecond. Of a text that is no JSON the count is right up to the mistake.
    """
    num_values, num_objects, depth, deepest, is_in_string = 1, 0, 0, 0, False
    start = 0
    while start < len(content):
        piece = content[start : start + _PIECE]
        if _num_trailing_backslashes(piece) % 2:
            piece = content[start : start + _PIECE + 1]  # an escape stays in one piece
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
        # Each comma and each bracket begins a value; an empty list counts as if it held one.
        num_values += int(np.count_nonzero(is_opening) + np.count_nonzero(marks == ord(",")))
        num_objects += int(np.count_nonzero(is_object))
        yield Size(num_values, num_objects, deepest)


def _num_trailing_backslashes(piece: bytes) -> int:
    return len(piece) - len(piece.rstrip(b"\\"))


def _check_size(size: Size, field: str, limits: Limits, max_values: int) -> None:
    if size.depth > limits.max_json_depth:
        rule = f"lists and objects {size.depth} deep are more than {limits.max_json_depth}"
        raise invalid(field, rule)
    # An object takes as long as ten numbers; a chat has one for each message and each of its parts.
    for number, what, most in (
        (size.num_values, "values", max_values),
        (size.num_objects, "objects", 4 * limits.max_messages),
    ):
        if number > most:
            rule = f"{number} {what} are more than the {most} that this server takes"
            raise invalid(field, rule)


def _object(field: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise invalid(field, f"the key {twice!r} stands in an object twice; leave one out")
    return made


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no JSON")
