"""Clients' JSON: limited before it is parsed, parsed as by json.loads, with unique keys."""

import json
import random

import pytest

from serving import json_input
from serving.errors import ServiceError
from serving.json_input import MAX_VALUES, Size, parse_object, sizes
from serving.limits import Limits

LIMITS = Limits(max_messages=16, max_json_depth=8)
OBJECTS = 4 * LIMITS.max_messages


def refusal(content: bytes, **options) -> str:
    with pytest.raises(ServiceError) as caught:
        parse_object(content, field="body", limits=LIMITS, **options)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert caught.value.field == "body"
    return caught.value.message


def size_of(value: object) -> Size:
    """The size by the parsed objects; an empty list counts as one with a value."""
    if not isinstance(value, list | dict):
        return Size(1, 0, 0)
    items = list(value.values()) if isinstance(value, dict) else value
    parts = [size_of(item) for item in items]
    return Size(
        1 + max(1, sum(part.num_values for part in parts)),
        isinstance(value, dict) + sum(part.num_objects for part in parts),
        1 + max((part.depth for part in parts), default=0),
    )


TEXTS = (
    *("", "a", '"', "\\", '\\"', '"[{', "}],:", "\\\\", "é\n\t", "\u2028\U0001f600", "\\u005c"),
    "/",
)


def document(rng: random.Random, depth: int = 0) -> object:
    kinds = "tnb" if depth == 6 else "tnbld"
    match rng.choice(kinds):
        case "t":
            return "".join(rng.choices(TEXTS, k=rng.randrange(4)))
        case "n":
            return rng.choice((0, -1, 1.5, 1e300, 10**30))
        case "b":
            return rng.choice((True, False, None))
        case "l":
            return [document(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        "".join(rng.choices(TEXTS, k=3)): document(rng, depth + 1) for _ in range(rng.randrange(4))
    }


def test_the_size_of_a_text_is_that_of_its_objects(num_cases, monkeypatch):
    for seed in range(num_cases("JSON documents", 1000)):
        rng = random.Random(seed)
        monkeypatch.setattr(json_input, "_PIECE", rng.choice((1, 2, 7, 1 << 16)))
        content = {"a": document(rng, 1)}
        text = json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
        *_, whole = sizes(text.encode())
        assert whole == size_of(content), text
        assert parse_object(text.encode(), field="body", limits=Limits()) == content


def test_counting_stops_at_the_first_limit(monkeypatch):
    """The rest of 40 MB is not read."""
    counted = []
    monkeypatch.setattr(
        json_input, "sizes", lambda content: (counted.append(1) or one for one in sizes(content))
    )
    assert "deep are more" in refusal(b"[" * 40_000_000)
    assert "values are more" in refusal(b'{"stop":[' + b"1," * 20_000_000)
    assert len(counted) == 1 + 1 + 2 * MAX_VALUES // json_input._PIECE


def test_a_text_at_the_limits_is_parsed():
    most = {"a": [1] * (MAX_VALUES - 3)}
    assert parse_object(json.dumps(most).encode(), field="body", limits=LIMITS) == most
    more = {"a": [1] * MAX_VALUES}
    assert "values" in refusal(json.dumps(more).encode())
    assert parse_object(json.dumps(more).encode(), field="b", limits=LIMITS, max_ids=9) == more
    objects = {"a": [{}] * (OBJECTS - 1)}
    assert parse_object(json.dumps(objects).encode(), field="b", limits=LIMITS) == objects
    for text in (b'{"a":' * 8 + b"1" + b"}" * 8, b'{"a": "[[[[[[[[[[[[\\"[[["}'):
        assert parse_object(text, field="body", limits=LIMITS)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b'{"a": 1, "a": 1}', "a"),
        (b'{"b": [{"x": {}, "y": 1, "\\u0078": null}]}', "x"),
        (b'{"": 1, "b": 2, "": 3}', ""),
        (b'{"a": {"deep": {"k": 1, "k": 2}}}', "k"),
    ],
)
def test_a_duplicate_key_is_named(content, key):
    assert f"the key {key!r} stands in an object twice" in refusal(content)


def test_duplicates_among_many_keys_are_found_in_linear_time():
    """Comparing all pairs would take minutes."""
    keys = ",".join(f'"k{i}":0' for i in range(MAX_VALUES - 4))
    assert "'k7'" in refusal(f'{{{keys},"k7":1}}'.encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_encodings_are_refused(encoding):
    """json.loads accepts them, and `sizes` cannot count their bytes."""
    assert "is not valid JSON" in refusal(
        json.dumps({"a": "∀"}, ensure_ascii=False).encode(encoding)
    )


def test_a_message_quotes_only_the_beginning_of_a_long_key():
    assert len(refusal(b'{"%s": 1, "%s": 1}' % ((b"k" * 90_000,) * 2))) <= 500


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_a_number_above_the_largest_float_is_refused(number):
    """It would become infinity: an answer that repeats it would be no JSON."""
    content = f'{{"metadata": {{"a": [{number}]}}}}'
    assert f"{number[:20]} is too large" in refusal(content.encode())
