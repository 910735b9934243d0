"""Measures a serialized protobuf message before it is parsed.

An empty submessage takes two bytes on the wire and 50 bytes of memory: 16 MiB become 430 MB. A
packed list of millions of numbers is one field, and parsing it takes tens of milliseconds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = range(6)


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Limits of a message.

    Args:
      fields: most fields, including those of submessages; a packed list is one field.
      numbers: most numbers of a packed list, by its path ("stopping.stop_token_ids").
      other_numbers: most numbers of every other packed list.
    """

    fields: int
    numbers: Mapping[str, int]
    other_numbers: int = 64

    def of(self, path: str) -> int:
        """Most numbers of the packed list at `path`."""
        return self.numbers.get(path, self.other_numbers)


@dataclass(frozen=True)
class Excess:
    """A limit that a message exceeds.

    Attributes:
      path: path of a packed list; empty for the number of fields.
      most: the limit.
      num_bytes: bytes of all packed lists at `path`, as far as they were read.
    """

    path: str
    most: int
    num_bytes: int = 0


def find_excess(data: bytes, message: Descriptor, limits: WireLimits) -> Excess | None:
    """The first limit that `data` exceeds, or None.

    A packed list is measured in bytes: it passes if it takes no more than the allowed count of
    longest numbers does. The servicer counts the numbers after parsing. Lists of one path count
    together, because the parser joins them. Measuring stops at the first excess, and where `data`
    is invalid: the parser reports that.
    """
    left = limits.fields
    num_bytes: Counter[str] = Counter()
    open_messages = [(0, len(data), message, "")]
    while open_messages:
        place, end, descriptor, path = open_messages.pop()
        parts = _parts_of(descriptor)
        while place < end:
            if left == 0:
                return Excess("", limits.fields)
            left -= 1
            tag, place = _varint(data, place, end)
            kind = tag & 7
            if kind == _BYTES:
                size, place = _varint(data, place, end)
                part = parts.get(tag >> 3)
                if part is not None and size:
                    name, inside, longest = part
                    if inside is not None:
                        after = min(place + size, end)
                        open_messages.append((place, after, inside, f"{path}{name}."))
                    else:
                        where = path + name
                        num_bytes[where] += size
                        most = limits.of(where)
                        if num_bytes[where] > most * longest:
                            return Excess(where, most, num_bytes[where])
                place += size
            elif kind == _VARINT:
                _, place = _varint(data, place, end)
            elif kind in (_FIXED32, _FIXED64):
                place += 4 if kind == _FIXED32 else 8
            elif kind not in (_START, _END):  # groups: their fields count as if they stood here
                break
    return None


_F = FieldDescriptor
_LONGEST = {
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_SINT32), 5),
    **dict.fromkeys((_F.TYPE_FIXED32, _F.TYPE_SFIXED32, _F.TYPE_FLOAT), 4),
    **dict.fromkeys((_F.TYPE_FIXED64, _F.TYPE_SFIXED64, _F.TYPE_DOUBLE), 8),
}
"""Most bytes of a number, by type. Other types take up to 10, as negative numbers do."""


@cache
def _parts_of(descriptor: Descriptor) -> dict[int, tuple[str, Descriptor | None, int]]:
    """Submessages and packed lists of a message by field number: name, message type, most bytes of
    a number.

    Cached, because a message may have thousands of such fields.
    """
    return {
        field.number: (field.name, field.message_type, _LONGEST.get(field.type, 10))
        for field in descriptor.fields
        if field.message_type is not None
        or (field.is_repeated and field.type not in (_F.TYPE_STRING, _F.TYPE_BYTES))
    }


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Reads a varint of up to ten bytes; returns the number and the position after it."""
    if place < end and data[place] < 128:
        return data[place], place + 1
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, place
