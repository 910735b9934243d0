"""A client's JSON, read field by field: what is wrong is named, and what nobody reads is refused."""

from collections.abc import Collection, Iterator, Mapping
from typing import Self

from serving.errors import invalid
from serving.params import refuse_unless_neutral


class Fields:
    """The fields of one object. A field that is null counts as left out.

    Every method raises `ServiceError` with INVALID_ARGUMENT for a field of another type.

    Args:
      where: what stands before a field's name in messages, as "stream_options.".
    """

    def __init__(self, content: Mapping[str, object], where: str = ""):
        self._content = {name: value for name, value in content.items() if value is not None}
        self._where = where
        self._left = set(self._content)

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def take(self, name: str) -> object:
        """The value as it is; None if it was left out."""
        self._left.discard(name)
        return self._content.get(name)

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is not None and not is_integer(value):
            raise self.wrong(name, "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.wrong(name, "is too large") from error

    def flag(self, name: str) -> bool:
        """False if it was left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; a single one counts as a list of one."""
        value = self.take(name)
        if isinstance(value, str):
            return [value]
        if value is not None and not is_list_of(str, value):
            raise self.wrong(name, "must be a string or a list of strings")
        return value or []

    def integers(self, name: str) -> list[int]:
        value = self.take(name)
        if value is not None and not (isinstance(value, list) and all(map(is_integer, value))):
            raise self.wrong(name, "must be a list of integers")
        return value or []

    def inner(self, name: str) -> Self | None:
        """The fields of an object within this one."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "must be an object")
        return None if value is None else Fields(value, f"{self._where}{name}.")

    def inners(self, name: str, *, most: int) -> Iterator[Self]:
        """The fields of each object in a list of at most so many."""
        value = self.take(name)
        if not isinstance(value, list):
            raise self.wrong(name, "must be a list of objects")
        if len(value) > most:
            raise self.wrong(name, f"{len(value)} are more than the {most} that this server takes")
        for place, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.wrong(f"{name}[{place}]", "must be an object")
            yield Fields(item, f"{self._where}{name}[{place}].")

    def refuse_unless(self, neutral: Mapping[str, tuple]) -> None:
        """Refuses fields of `neutral` that ask for something: a value other than those given there."""
        for name, values in neutral.items():
            value = self.take(name)
            # 0 == False in Python, and in JSON they are two things.
            same = tuple(one for one in values if isinstance(one, bool) == isinstance(value, bool))
            if value is not None:
                refuse_unless_neutral(f"{self._where}{name}", value, same, "this")

    def done(self, *, ignored: Collection[str] = ()) -> None:
        """Refuses what was not read, `ignored` aside."""
        unknown = sorted(self._left - set(ignored))
        if unknown:
            raise self.wrong(unknown[0], "is not a field that this server knows; leave it out")

    def wrong(self, name: str, rule: str):
        """INVALID_ARGUMENT that names the field."""
        return invalid(f"{self._where}{name}", rule)


def is_integer(value: object) -> bool:
    """JSON's integers; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
