"""Kinds of parameters: a type hint, words for a docstring, and arguments for examples."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from lab.embedded.exercises.vocabulary import WORDS


@dataclass(frozen=True)
class Kind:
    """A kind of argument.

    Attributes:
      hint: its type hint.
      noun: "a list of integers".
      short: "the list"; empty where only the parameter's name is clear.
      draw: draws an argument.
    """

    hint: str
    noun: str
    short: str
    draw: Callable[[Random], Any]


def _ints(least: int, most: int, low: int = -20, high: int = 50):
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def _words(rng: Random) -> list[str]:
    words = rng.sample(WORDS, rng.randint(2, 5))
    if rng.random() < 0.3:
        words.append(rng.choice(words))
    return [word.capitalize() if rng.random() < 0.15 else word for word in words]


def _sentence(rng: Random) -> str:
    words = rng.sample(WORDS, rng.randint(2, 5))
    if rng.random() < 0.4:
        words[0] = words[0].capitalize()
    return " ".join(words) + rng.choice(["", "", "", "!", "."])


def _mixed(rng: Random) -> str:
    pieces = [rng.choice(WORDS), str(rng.randint(1, 999)), rng.choice(WORDS).capitalize()]
    rng.shuffle(pieces)
    return rng.choice(["", "-", " ", "_"]).join(pieces[: rng.randint(2, 3)])


def _pair(rng: Random) -> str:
    return "".join(rng.choice("aeilnort") for _ in range(2))


def _list(noun: str, draw) -> Kind:
    return Kind("list[int]", noun, "the list", draw)


def _int(noun: str, low: int, high: int) -> Kind:
    return Kind("int", noun, "", lambda rng: rng.randint(low, high))


KINDS = {
    "ints": _list("a list of integers", _ints(0, 6)),
    "some_ints": _list("a list of several integers", _ints(3, 6)),
    "small_ints": _list("a list of integers", _ints(2, 5, 0, 9)),
    "words": Kind("list[str]", "a list of strings", "the list", _words),
    "text": Kind("str", "a string", "the string", _sentence),
    "word": Kind("str", "a word", "the word", lambda rng: rng.choice(WORDS)),
    "mixed": Kind("str", "a string", "the string", _mixed),
    "pair": Kind("str", "a string", "", _pair),
    "int": _int("an integer", -50, 150),
    "natural": _int("a number from 0 on", 0, 12),
    "positive": _int("a positive number", 1, 150),
    "large": _int("a positive number", 10, 99999),
    "base": _int("a base from 2 to 9", 2, 9),
    "size": _int("a positive number", 2, 4),
    "limit": _int("an integer", 0, 30),
    "length_above": _int("an integer", 13, 60),
}
"""Kinds by the name that signatures of templates use."""
