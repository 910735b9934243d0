"""Random JSON schemas within what the server enforces, varied and small enough to be
written out.
"""

import random

FORMATS = ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid")
WORDS = ("name", "age", "tags", "id", "size", "note", "kind", "x")


def _string(rng: random.Random) -> dict:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "minLength": rng.randint(1, 3), "maxLength": rng.randint(3, 9)},
            {"type": "string", "pattern": r"^[a-c]{1,3}-[0-9]{2}$"},
            {"type": "string", "pattern": "^(left|right)[0-9]?$"},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"const": rng.choice(["", "a b", 'quote " and \\', "ä€😀", "line\nbreak"])},
        ]
    )


def _number(rng: random.Random) -> dict:
    low = rng.randint(-200, 200)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 17, 5000])},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": rng.randint(2, 1000)},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 12]), "minimum": 0, "maximum": 999},
            {"type": "number", "minimum": 0, "maximum": rng.choice([1, 2.5])},
        ]
    )


def _leaf(rng: random.Random) -> dict:
    return rng.choice(
        [
            _string,
            _number,
            lambda rng: {"type": "boolean"},
            lambda rng: {"type": "null"},
            _combined,
            lambda rng: {"enum": rng.sample(["red", "green", 7, -1.5, None, True, [1], {}], 3)},
        ]
    )(rng)


def _combined(rng: random.Random) -> dict:
    """Several schemas of one value: all of them hold, or one, or one of several types."""
    low = rng.randint(0, 9)
    return rng.choice(
        [
            {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(0, 99)}]},
            {"oneOf": [{"type": "boolean"}, {"type": "null"}, {"const": "both"}]},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            {"type": ["string", "boolean"], "maxLength": 4},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict:
    least = rng.randint(0, 2)
    if rng.random() < 0.3:
        items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    items = _schema(rng, depth - 1)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _object(rng: random.Random, depth: int) -> dict:
    names = rng.sample(WORDS, rng.randint(0, 3))
    schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["patternProperties"] = {"^p_[a-z]$": {"type": "boolean"}}
    elif rng.random() < 0.1:
        schema |= {
            "additionalProperties": {"type": "boolean"},
            "required": names,
            "maxProperties": 4,
        }
    return schema


def _schema(rng: random.Random, depth: int) -> dict:
    if depth == 0:
        return _leaf(rng)
    match rng.randrange(8):
        case 0 | 1:
            return _leaf(rng)
        case 2 | 3:
            return _array(rng, depth)
        case 4:
            return {"anyOf": [_schema(rng, depth - 1), _leaf(rng)]}
        case 5:
            return {"$ref": "#/$defs/shared"}
        case _:
            return _object(rng, depth)


def random_schema(rng: random.Random) -> dict:
    """A schema up to three levels deep; an object at the top more often than not."""
    schema = _object(rng, 2) if rng.random() < 0.6 else _schema(rng, 2)
    return {**schema, "$defs": {"shared": _leaf(rng)}}
