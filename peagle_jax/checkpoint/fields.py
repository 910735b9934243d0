"""Validated reading of untrusted JSON: `Fields` returns a value of the right kind or names the bad
key."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle_jax.checkpoint.safetensors import CheckpointError

_LARGEST, _SMALLEST = 3.4028235e38, 1.1754944e-38
"""Bounds of normal float32 numbers; norms and rope are computed in float32."""


def read_json(path: Path) -> dict:
    """A JSON file as a dict.

    Raises:
      CheckpointError: cannot be read, is not a JSON object, or states a key twice.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw


def _unique(pairs: list[tuple[str, object]]) -> dict:
    raw = dict(pairs)
    if len(raw) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} stands there twice")
    return raw


_MOST_NAMED, _LONGEST_NAME = 10, 60


def named(keys: Sequence[str]) -> str:
    """Keys of an untrusted file for a message: the first ten, cut, and the number of the others."""
    cut = lambda key: key if len(key) <= _LONGEST_NAME else f"{key[:_LONGEST_NAME]}.."
    text = ", ".join(map(cut, keys[:_MOST_NAMED]))
    return text + (f" and {len(keys) - _MOST_NAMED:,} more" if len(keys) > _MOST_NAMED else "")


def read_config(folder: Path) -> dict:
    """`config.json` of a model folder.

    Raises:
      CheckpointError: missing, or not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        why = "no config.json" if folder.is_dir() else "no such folder"
        why = "a file, and no GGUF file" if folder.is_file() else why
        raise CheckpointError(f"{folder}: {why}; give a Hugging Face model folder")
    return read_json(path)


@dataclass(frozen=True)
class Fields:
    """A JSON object of the file or folder `where`; null means the same as a missing key.

    Raises:
      CheckpointError: (all methods but `get`) a value of another kind, or none and no default.
    """

    raw: dict
    where: str

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def get(self, key: str, default=None):
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str):
        value = self.get(key)
        if value is None:
            file = "" if ".json" in self.where or ".gguf" in self.where else "config.json "
            raise self.error(f"{file}states no {key}")
        return value

    def _kind(self, key: str, default, kinds: tuple[type, ...], what: str):
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(f"{key} must be {what}, not {value!r}")
        return value

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self._kind(key, default, (int,), "a whole number")
        if not least <= value <= most:
            raise self.error(f"{key} must be a whole number from {least} to {most}, not {value!r}")
        return value

    def number(
        self, key: str, default: float | None = None, *, positive: bool = False, above: float = 0.0
    ) -> float:
        """A number that float32 can hold; greater than `above` if it must be `positive`."""
        value = self._kind(key, default, (int, float), "a number")
        if not -_LARGEST <= value <= _LARGEST:  # infinite and NaN too
            raise self.error(f"{key} must be a finite number, not {value!r}")
        if positive and not value > above:
            raise self.error(f"{key} must be a number greater than {above:g}, not {value!r}")
        if 0 < abs(value) < _SMALLEST:
            raise self.error(f"{key} {value!r} is too small, float32 holds {_SMALLEST} and more")
        return float(value)

    def flag(self, key: str, default: bool | None = False) -> bool:
        return self._kind(key, default, (bool,), "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._kind(key, default, (str,), "a text")

    def items(self, key: str, default: list | None = None) -> list:
        return self._kind(key, default, (list,), "a list")

    def inner(self, key: str, default: dict | None = None) -> "Fields":
        return Fields(self._kind(key, default, (dict,), "an object"), self.where)

    def only(self, key: str, *allowed, hint: str = "") -> None:
        """Refuses a stated value other than `allowed`: a feature that is not done here."""
        value = self.get(key)
        if value is not None and value not in allowed:
            known = " or ".join(repr(choice) for choice in allowed) or "leaving it out"
            raise self.error(f"{key} {value!r} is not supported, {known} is{hint}")

    def ids(self, key: str, least: int = 0) -> tuple[int, ...] | None:
        """Token ids, stated as one number or a list of them; None if there are none."""
        value = self.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(
            isinstance(token, bool) or not isinstance(token, int) or token < least for token in ids
        ):
            raise self.error(f"{key} must be a token id or a list of them, not {value!r}")
        return tuple(ids)
