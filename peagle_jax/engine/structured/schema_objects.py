"""How many optional properties of a JSON schema's objects stand side by side in llguidance's
parser.

The parser keeps a row of items for the place in a text: where an object begins, 4 for each property
up to the first required one, and behind a comma 1 for each up to the next required one.
Alternatives add up. A row with more than `MOST_ITEMS` ends the text, so the schema is refused
before.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_ITEMS = 2000
"""Items of a row."""
MOST_OPTIONAL = (
    "about 490 may come before the first required one, 1,900 between two required ones, "
    "44 with minProperties"
)
"""The same in words of a schema."""
_FREE = 8
"""Items of the keys that a schema does not name."""
_MOST_ALTERNATIVES = 1024


def may_be_object(part: dict) -> bool:
    """Whether the type of a schema, if it has one, includes objects."""
    types = part.get("type", "object")
    return "object" in types if isinstance(types, list) else types == "object"


def has_free_keys(part: dict) -> bool:
    """Whether an object may have keys that its schema does not name."""
    return part.get("additionalProperties") is not False or bool(part.get("patternProperties"))


@dataclass(frozen=True)
class _Object:
    """An alternative: names in the order of the text, the required ones, whether one more is
    required by `minProperties`, and whether there may be other names."""

    names: dict[str, None]
    required: frozenset[str]
    needs_one: bool = False
    is_free: bool = True

    def beside(self, other: "_Object") -> "_Object":
        """An object that satisfies both."""
        needs_one = self.needs_one or other.needs_one
        is_free = self.is_free and other.is_free
        return _Object(self.names | other.names, self.required | other.required, needs_one, is_free)

    @property
    def num_optional(self) -> int:
        return len(self.names) - len(self.required)

    def items(self) -> tuple[int, int]:
        """Items where the object begins, and most behind a comma."""
        if (
            self.needs_one and self.num_optional
        ):  # llguidance writes one alternative for each optional property
            number = self.num_optional * (self.num_optional + 1)
            return number, number
        runs = [0]
        for name in self.names:
            if name in self.required:
                runs.append(0)
            else:
                runs[-1] += 1
        is_free = self.is_free and len(runs) == 1
        return max(1, 4 * runs[0] + _FREE * is_free), max(runs) + 1


class Objects:
    """Objects of a schema, with their references and alternatives.

    Args:
      root: the whole schema.
    """

    def __init__(self, root: dict):
        self._root = root
        self._known: dict[int, list[_Object]] = {}

    def too_many(self, part: dict) -> int | None:
        """Optional properties of what may stand at a part of the schema, if they exceed
        `MOST_ITEMS`."""
        found = self._alternatives(part)
        begin, behind = 0, Counter()
        for one in found:
            first, later = one.items()
            begin += first
            behind[tuple(one.names)] += later  # other names mostly tell alternatives apart by then
        if max(begin, *behind.values(), 0) <= MOST_ITEMS:
            return None
        return sum(one.num_optional for one in found) or None

    def _alternatives(self, part: object) -> list[_Object]:
        if not isinstance(part, dict):
            return [] if part is False else [_ANY]
        if id(part) not in self._known:
            self._known[id(part)] = [_ANY]  # for a reference within itself
            self._known[id(part)] = self._merged(part)
        return self._known[id(part)]

    def _merged(self, part: dict) -> list[_Object]:
        if not may_be_object(part) or "const" in part or "enum" in part:
            return []  # objects that are constants have no optional property
        found = [_own(part)]
        for other in self._beside(part):
            pairs = itertools.islice(itertools.product(found, other), _MOST_ALTERNATIVES)
            found = [left.beside(right) for left, right in pairs]
        return found

    def _beside(self, part: dict) -> Iterator[Sequence[_Object]]:
        """What an object must satisfy besides its own keywords, each as a list of alternatives."""
        if isinstance(part.get("$ref"), str):
            yield self._alternatives(self._target(part["$ref"]))
        for key in ("allOf", "anyOf", "oneOf"):
            parts = part.get(key)
            if isinstance(parts, list):
                each = [self._alternatives(one) for one in parts]
                either = itertools.islice(itertools.chain(*each), _MOST_ALTERNATIVES)
                yield from each if key == "allOf" else [list(either)]

    def _target(self, reference: str) -> object:
        """The part that a reference such as "#/$defs/Point" names; True if it is of another
        form."""
        value: object = self._root if reference.startswith("#") else True
        for name in reference.split("/")[1:]:
            value = value.get(name, True) if isinstance(value, dict) else True
        return value


def _own(part: dict) -> _Object:
    """The object of a schema's own keywords."""
    names, required = part.get("properties"), part.get("required")
    names = names if isinstance(names, dict) else {}
    required = required if isinstance(required, list) else []
    required = dict.fromkeys(one for one in required if isinstance(one, str))
    least = part.get("minProperties")
    needs_one = isinstance(least, int) and least > len(required) and "maxProperties" not in part
    is_free = has_free_keys(part)
    return _Object(dict.fromkeys([*names, *required]), frozenset(required), needs_one, is_free)


_ANY = _Object({}, frozenset())
