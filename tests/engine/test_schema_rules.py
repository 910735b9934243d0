"""Schemas that llguidance would enforce in part: each is refused by its place, or enforced."""

import datetime
import ipaddress
import json
import random
import re
import uuid

import numpy as np
import pytest

from peagle_jax import ConfigError
from peagle_jax.engine.structured.grammar import Matcher
from peagle_jax.engine.structured.schema_rules import _is_read_exactly
from peagle_jax.structured import Structured


def refusal(grammars, schema) -> str:
    with pytest.raises(ConfigError) as caught:
        grammars.compile(Structured.json_schema(schema))
    assert caught.value.field == "structured"
    return caught.value.rule


def after(grammars, tokenizer, schema, text: str) -> Matcher:
    """The matcher of a schema after a text, with the mask of what may follow."""
    matcher = grammars.compile(Structured.json_schema(schema))
    for token in tokenizer.encode(text, special=False):
        matcher.matcher.compute_bitmask()
        matcher.consume([token])
    return matcher


def admits(grammars, tokenizer, schema, text: str) -> bool:
    matcher = after(grammars, tokenizer, schema, text)
    return matcher.error is None and matcher.is_complete


def named(number: int, prefix: str = "p", **others) -> dict:
    """An object with so many properties."""
    properties = {f"{prefix}{place:04d}": {"type": "integer"} for place in range(number)}
    return {"type": "object", "properties": properties, "additionalProperties": False} | others


INEXACT = {
    "#/const: 1152921504606846977 ": '{"const": 1152921504606846977}',
    "#/enum: 9007199254740993 ": '{"enum": [1, 9007199254740993]}',
    "#/const: 12345678901234567890123 ": '{"const": 12345678901234567890123}',
    "#/maximum: 9223372036854775811 ": '{"type": "integer", "maximum": 9223372036854775811}',
    "#/minimum: -9223372036854775809 ": '{"type": "integer", "minimum": -9223372036854775809, '
    '"maximum": -9223372036854775809}',
    "#/exclusiveMinimum: 9007199254740992 ": '{"type": "integer", "exclusiveMinimum": '
    "9007199254740992}",
    "#/exclusiveMaximum: -9007199254740992 ": '{"type": "integer", "exclusiveMaximum": '
    "-9007199254740992}",
    "#/multipleOf: 9007199254740993 ": '{"type": "integer", "multipleOf": 9007199254740993}',
    "#/$defs/id/anyOf/1/properties/x/const: "
    "9007199254740993 ": '{"$ref": "#/$defs/id", "$defs": {"id": {"anyOf": [{}, {"properties": '
    '{"x": {"const": 9007199254740993}}}]}}}',
    "#/const: 9007199254740995 ": '{"const": {"a": [9007199254740995]}}',
    "#/maximum: 1e+300 ": '{"type": "number", "maximum": 1e300}',
    "#/const: 123456789.12345679 ": '{"const": 123456789.12345679}',
    "#/minimum: 7.81736020229395e-10 ": '{"type": "number", "minimum": 7.81736020229395e-10}',
}


@pytest.mark.parametrize("place", INEXACT)
def test_numbers_that_float64_does_not_hold_are_refused_by_their_place(grammars, place):
    rule = refusal(grammars, INEXACT[place])
    assert rule.startswith(place), rule
    assert "exactly" in rule


EXACT = [
    ({"const": 9007199254740992}, "9007199254740992", "9007199254740993"),
    ({"enum": [-9007199254740991]}, "-9007199254740991", "-9007199254740992"),
    ({"type": "integer", "maximum": 9007199254740992}, "9007199254740992", "9007199254740993"),
    (
        {"type": "integer", "exclusiveMinimum": 9007199254740991},
        "9007199254740992",
        "9007199254740991",
    ),
    ({"const": 3.141592653589793}, "3.141592653589793", "3.141592653589794"),
    ({"type": "integer", "default": 2**60, "examples": [2**61]}, str(2**70), "0.5"),
    (
        {"type": "object", "properties": {"const": {"default": 2**60}, "minimum": {}}},
        '{"const": 1}',
        "1",
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), EXACT)
def test_other_numbers_are_enforced(grammars, tokenizer, schema, valid, invalid):
    assert admits(grammars, tokenizer, schema, valid)
    assert not admits(grammars, tokenizer, schema, invalid)


def test_decimals_that_pass_are_written_as_they_are(grammars, tokenizer):
    """The grammar of a constant is that of the nearest float64, or the constant is refused."""
    rng, passed = random.Random(0), 0
    for _ in range(100):
        digits, exponent = rng.choice([3, 9, 15, 17]), rng.randint(-9, 9)
        value = float(f"{rng.randrange(10 ** (digits - 1), 10**digits)}e{exponent - digits}")
        if not _is_read_exactly(value):
            continue
        passed += 1
        matcher, text = grammars.compile(Structured.json_schema({"const": value})), b""
        while not matcher.is_complete:
            (token,) = matcher.forced(1)
            text += tokenizer.decode([token]).encode()
            matcher.consume([token])
        assert float(text) == value
    assert 50 < passed < 100


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (named(1000, additionalProperties=True), '{"p0001": 1,'),
        (named(1800, required=["p0000"]), '{"p0000": 1,'),
        ({"anyOf": [named(500), named(500, "q"), {"type": "null"}]}, '{"q0003": 1,'),
    ],
)
def test_many_optional_properties_fit_the_parsers_rows(grammars, tokenizer, schema, text):
    matcher = after(grammars, tokenizer, schema, text)
    matcher.matcher.compute_bitmask()
    assert matcher.error is None


@pytest.mark.parametrize(
    ("schema", "is_enforced"),
    [
        (
            {
                "type": "object",
                "patternProperties": {"^a$": {}},
                "additionalProperties": False,
                "minProperties": 2,
            },
            False,
        ),
        ({"minProperties": 2}, False),
        ({"type": ["object", "null"], "required": ["a"], "minProperties": 3}, False),
        ({"anyOf": [{"type": "null"}, {"type": "object", "minProperties": 2}]}, False),
        ({"minProperties": 1}, True),
        ({"type": "object", "required": ["a", "a", "b"], "minProperties": 3}, True),
        ({"type": "string", "minProperties": 2}, True),
        (named(3, required=["p0000", "p0001", "p0002"], minProperties=3), True),
    ],
)
def test_free_keys_that_may_repeat_do_not_count(grammars, schema, is_enforced):
    if is_enforced:
        grammars.compile(Structured.json_schema(schema))
    else:
        assert "minProperties: " in refusal(grammars, schema)
        assert "written twice" in refusal(grammars, schema)


@pytest.mark.parametrize("keyword", ["properties", "patternProperties"])
def test_no_free_key_spells_a_named_one_with_escapes(grammars, tokenizer, keyword):
    """A reader takes the second of two equal keys, free of the first one's schema."""
    name = "a" if keyword == "properties" else "^a$"
    schema = {"type": "object", keyword: {name: {"const": 1}}}
    assert admits(grammars, tokenizer, schema, '{"a": 1, "b\\n\\"": "é\\\\"}')
    assert not admits(grammars, tokenizer, schema, '{"a": 1, "\\u0061": 2}')
    assert not admits(grammars, tokenizer, schema, '{"\\u0061": 2}')
    closed = {"type": "object", "properties": {"a": {"type": "string"}}} | {
        "additionalProperties": False
    }
    assert admits(grammars, tokenizer, closed, '{"a": "\\u001b"}')


def test_a_constant_that_needs_escapes_is_refused_beside_free_keys(grammars, tokenizer):
    """Without \\u llguidance would leave its control characters out."""
    parts = {"type": "object", "properties": {"a": {"const": "x\0"}}}
    assert refusal(grammars, parts).startswith("#/properties/a/const: a control character")
    closed = parts | {"additionalProperties": False}
    assert admits(grammars, tokenizer, closed, '{"a": "x\\u0000"}')
    assert not admits(grammars, tokenizer, closed, '{"a": "x"}')


def test_a_clients_own_style_stays(grammars, tokenizer):
    schema = {"properties": {"a": {}}, "x-guidance": {"whitespace_flexible": False}}
    assert admits(grammars, tokenizer, schema, '{"a":1}')
    assert not admits(grammars, tokenizer, schema, '{"a": 1}')


def test_references_in_a_circle_are_counted_once(grammars):
    parts = named(5, anyOf=[{"$ref": "#/$defs/a"}, {}])
    assert "circular" in refusal(grammars, {"$ref": "#/$defs/a", "$defs": {"a": parts}})


@pytest.mark.parametrize("form", ['{"$ref": "%s"}', '{"allOf": [{"$ref": "%s"}]}'])
def test_a_chain_of_references_without_end_is_refused(grammars, form):
    """llguidance would end the process."""
    chain = {f"n{place}": json.loads(form % f"#/$defs/n{place + 1}") for place in range(3000)}
    rule = refusal(grammars, {"properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": chain})
    assert rule == "a schema is nested too deeply"


_PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {}},
    "required": ["a", "b"],
}
ONE_LINE, INDENTED, NONE = '{"a": 1, "b": []}', '{\n  "a": 1,\n  "b": []\n}', '{"a":1,"b":[]}'
ENDLESS = ["{  ", "{\n", "{\t"]


@pytest.mark.parametrize("schema", [_PAIR, {}, True, {"type": "object"}], ids=str)
def test_white_space_is_bounded(grammars, tokenizer, schema):
    for text in (ONE_LINE, NONE):
        assert admits(grammars, tokenizer, schema, text)
    for text in ENDLESS:
        assert after(grammars, tokenizer, schema, text).error, text


def test_a_client_chooses_the_white_space(grammars, tokenizer):
    by_pattern = {"": [NONE], "[ ]?": [NONE, ONE_LINE], "[\\n ]*": [NONE, ONE_LINE, INDENTED]}
    for pattern, admitted in by_pattern.items():
        for structured in (
            Structured.json_schema(_PAIR, pattern),
            Structured.json_object(pattern),
            Structured.json_schema(True, pattern),
        ):
            for text in (NONE, ONE_LINE, INDENTED):
                matcher = grammars.compile(structured)
                matcher.consume(tokenizer.encode(text, special=False))
                assert (matcher.error is None and matcher.is_complete) == (text in admitted)


def rfc3339_time(text: str) -> bool:
    return bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", text)) and bool(
        datetime.time.fromisoformat(text)
    )


AJV_EMAIL = (
    r"[a-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[a-z0-9!#$%&'*+/=?^_`{|}~-]+)*@"
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
)
FQDN = r"(?:(?!-)[-a-z0-9]{1,63}(?<!-)\.)*(?!-)[-a-z0-9]{1,63}(?<!-)"
FORMATS = {
    "date": datetime.date.fromisoformat,
    "time": rfc3339_time,
    "date-time": lambda text: (
        text[10] == "T" and datetime.date.fromisoformat(text[:10]) and rfc3339_time(text[11:])
    ),
    "hostname": lambda text: len(text) <= 253 and re.fullmatch(FQDN, text.lower()),
    "email": lambda text: len(text) <= 254 and re.fullmatch(AJV_EMAIL, text.lower()),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}
"""What other libraries say of a text: false, or `ValueError`, if they refuse it."""
REFUSED_BY_FORMAT = {
    "date": ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-1-1"],
    "time": ["01:02:02z", "01:02:60Z", "01:02:03.1234567Z", "01:02:03", "24:00:00Z", "01:02:03.Z"],
    "date-time": ["2023-02-29T00:00:00Z", "2024-01-01t00:00:00Z", "2024-01-01T00:00:00"],
    "hostname": ["a." * 127 + "a", "-a", "a-", "a" * 64, "a..b"],
    "email": ["a@b", "a@[1.2.3.4]", "a.@b.cc", "a" * 65 + "@b.cc", "a@-b.cc"],
}
VALID = {
    "date": ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
    "time": ["23:59:59Z", "01:02:03.123456+05:30"],
    "date-time": ["2024-02-29T01:02:03.5-08:00"],
    "hostname": ["localhost", "a.b.c.d.e.f.g", "x" * 63 + ".example"],
    "email": ["first.middle.last+tag@mail.example.co.uk", "a" * 64 + "@example.com"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_agrees_with_validators(grammars, tokenizer, name):
    schema = {"type": "string", "format": name}
    for text in REFUSED_BY_FORMAT.get(name, ()):
        assert not admits(grammars, tokenizer, schema, json.dumps(text)), text
    for text in VALID.get(name, ()):
        assert admits(grammars, tokenizer, schema, json.dumps(text)), text
    rng = random.Random(0)
    for _ in range(100):
        text = json.loads(random_text(grammars, tokenizer, schema, rng))
        assert FORMATS[name](text), text


def random_text(grammars, tokenizer, schema, rng: random.Random) -> str:
    """A text within the masks; it ends where it can with a probability of a quarter."""
    matcher, tokens = grammars.compile(Structured.json_schema(schema)), []
    (quote,) = tokenizer.encode('"', special=False)
    while not matcher.is_complete:
        bits = np.frombuffer(matcher.matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        token = quote if quote in allowed and rng.random() < 0.25 else rng.choice(allowed)
        tokens.append(token)
        matcher.consume([token])
        assert matcher.error is None
    return tokenizer.decode(tokens)


def test_a_format_holds_beside_patterns_and_in_parts_alone(grammars, tokenizer):
    both = {"type": "string", "format": "date", "pattern": "^19", "allOf": [{"pattern": "5$"}]}
    assert admits(grammars, tokenizer, both, '"1924-01-05"')
    for text in ('"2024-01-05"', '"1924-01-06"', '"1923-02-29"', '"195"'):
        assert not admits(grammars, tokenizer, both, text)
    named = {"type": "object", "properties": {"format": {"const": {"format": "date"}}}}
    assert admits(grammars, tokenizer, named, '{"format": {"format": "date"}}')
