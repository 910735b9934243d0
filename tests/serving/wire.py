"""Protobuf messages to try a service with: drawn over its descriptors, or broken on the wire."""

import json
from collections.abc import Callable

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_JSON = ({}, {"a": 1}, {"field": 1}, {"messages": []}, {"self": None}, [], 1, "x", {"": {"": [[]]}})
_WORDS = (
    *("tiny", "text_input", "stream", "sampling_parameters", "exclude_input_in_output", "BYTES"),
    *("BOOL", "INT32", '{"max_tokens": 3}', '{"max_tokens": "many", "temperature": NaN}'),
    *("a+", "[ab]*"),
)
"""What one of the services knows, for requests that get further than the first check."""
TEXTS = st.one_of(
    st.sampled_from(_WORDS),
    st.sampled_from(("", "a", "hello there", "user", "\x00", "\ufffd\u202e\U0001f600", "x" * 300)),
    st.sampled_from(("{", "nan", "-1", *map(json.dumps, _JSON))),
    st.text(max_size=20),
)
FLOATS = st.one_of(
    st.sampled_from((0.0, -0.0, 0.5, 1.0, 1.5, 100.0, 101.0, -1.0, 1e-45, 3.4e38)),
    st.sampled_from((float("nan"), float("inf"), float("-inf"))),
)
_MAX_DEPTH = 5


def _ints(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    places = (low, high - 1, high, -1, *range(6), 16, 17, 95, 96, 127, 128, 256, 2**31 - 1, 2**31)
    edges = dict.fromkeys(places)
    return st.sampled_from([edge for edge in edges if low <= edge <= high])


_F = FieldDescriptor
_SCALARS = {
    **dict.fromkeys((_F.TYPE_DOUBLE, _F.TYPE_FLOAT), FLOATS),
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), _ints(32, signed=True)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), _ints(64, signed=True)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), _ints(32, signed=False)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), _ints(64, signed=False)),
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_STRING: TEXTS,
    _F.TYPE_BYTES: st.one_of(
        st.binary(max_size=40),
        st.sampled_from((b"\x05\0\0\0hello", b"\xff\xff\xff\xffa", b"\x01\0\0\0\xff", b"\x01")),
    ),
    _F.TYPE_ENUM: st.sampled_from((0, 1, 2, 99, -1)),
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    return _SCALARS[field.type]


def _setter(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Callable[[Message], None]]:
    """Draws something that sets the field."""
    name = field.name
    if is_map(field):
        by_name = field.message_type.fields_by_name
        pairs = st.dictionaries(
            _one(by_name["key"], depth), _one(by_name["value"], depth), max_size=3
        )

        def fill(message: Message, values: dict) -> None:
            for key, value in values.items():
                if isinstance(value, Message):
                    getattr(message, name)[key].CopyFrom(value)
                else:
                    getattr(message, name)[key] = value

        return pairs.map(lambda values: lambda message: fill(message, values))
    one = _one(field, depth)
    if field.is_repeated:
        many = one.flatmap(lambda value: st.sampled_from((20, 300)).map(lambda n: [value] * n))
        several = st.one_of(st.lists(one, max_size=4), st.lists(one, max_size=4), many)
        return several.map(lambda values: lambda message: getattr(message, name).extend(values))
    if field.message_type is not None:
        return one.map(lambda value: lambda message: getattr(message, name).CopyFrom(value))
    return one.map(lambda value: lambda message: setattr(message, name, value))


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Any message: each field is left out or drawn from values at the edges of what it may hold."""
    make = GetMessageClass(descriptor)
    if depth > _MAX_DEPTH:
        return st.builds(make)
    fields = [field for field in descriptor.fields if field.message_type is not descriptor]
    if not fields:
        return st.builds(make)
    # Few fields at a time: with all of them some mistake would always hide the rest.
    chosen = st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.name)
    setters = chosen.flatmap(lambda some: st.tuples(*(_setter(field, depth) for field in some)))

    def build(some: tuple) -> Message:
        message = make()
        for setter in some:
            setter(message)
        return message

    return setters.map(build)


def broken(descriptor: Descriptor) -> st.SearchStrategy[bytes]:
    """Bytes in a message's place: random, or a message with some bytes changed, lost or doubled."""

    def change(pair: tuple[bytes, list[tuple[int, int]]]) -> bytes:
        data = bytearray(pair[0])
        for place, byte in pair[1]:
            if data:
                data[place % len(data)] = byte
        return bytes(data)

    serialized = messages(descriptor).map(lambda message: message.SerializeToString())
    places = st.lists(
        st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4
    )
    cut = st.tuples(serialized, st.integers(0, 64)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(
        st.binary(max_size=200),
        st.tuples(serialized, places).map(change),
        cut,
        serialized.map(lambda data: data * 2),
    )


def has_path(descriptor: Descriptor, path: str) -> bool:
    """Whether a path such as "stopping.stop" leads to a field, or to a oneof, of the message.

    A number stands for a field that this version does not know, and text after a map for its key.
    """
    for part in path.split("."):
        name = part.partition("[")[0]
        if name.isdigit():
            return True
        if descriptor is None:
            return False
        if name in descriptor.oneofs_by_name:
            descriptor = None
            continue
        if name not in descriptor.fields_by_name:
            return False
        descriptor = descriptor.fields_by_name[name].message_type
    return True
