"""Kinds of parameters: a type hint, words for a docstring, and arguments for examples."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from peagle_jax.training.exercises.vocabulary import NAMES_OF_PEOPLE, WORDS


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


def _few_values(rng: Random) -> list[int]:
    return [rng.randint(1, 5) for _ in range(rng.randint(4, 8))]


def _sorted_ints(rng: Random) -> list[int]:
    return sorted(rng.sample(range(-10, 60), rng.randint(3, 7)))


def _floats(rng: Random) -> list[float]:
    return [rng.randint(-20, 40) / 2 for _ in range(rng.randint(3, 5))]


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


def _counts(rng: Random) -> dict[str, int]:
    return {word: rng.randint(0, 20) for word in rng.sample(WORDS, rng.randint(2, 4))}


def _pairs(rng: Random) -> list[tuple[str, int]]:
    names = rng.sample(WORDS, 3)
    return [(rng.choice(names), rng.randint(1, 20)) for _ in range(rng.randint(3, 4))]


def _intervals(rng: Random) -> list[tuple[int, int]]:
    starts = [rng.randint(0, 20) for _ in range(rng.randint(2, 4))]
    return [(start, start + rng.randint(1, 6)) for start in starts]


def _interval(rng: Random) -> tuple[int, int]:
    start = rng.randint(0, 10)
    return start, start + rng.randint(1, 9)


def _matrix(rng: Random) -> list[list[int]]:
    width = rng.randint(2, 3)
    return [[rng.randint(-5, 9) for _ in range(width)] for _ in range(rng.randint(2, 3))]


def _square(rng: Random) -> list[list[int]]:
    width = rng.randint(2, 3)
    return [[rng.randint(0, 9) for _ in range(width)] for _ in range(width)]


def _nested(rng: Random, depth: int = 2) -> list:
    return [
        _nested(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randint(0, 9)
        for _ in range(rng.randint(1, 3))
    ]


def _people(rng: Random) -> list[dict[str, Any]]:
    return [
        {"name": name, "age": rng.randint(15, 70)}
        for name in rng.sample(NAMES_OF_PEOPLE, rng.randint(2, 3))
    ]


def _int(low: int, high: int):
    return lambda rng: rng.randint(low, high)


KINDS = {
    "ints": Kind("list[int]", "a list of integers", "the list", _ints(0, 6)),
    "some_ints": Kind("list[int]", "a list of several integers", "the list", _ints(3, 6)),
    "small_ints": Kind("list[int]", "a list of integers", "the list", _ints(2, 5, 0, 9)),
    "positive_ints": Kind("list[int]", "a list of positive integers", "the list", _ints(2, 6, 1, 60)),
    "few_values": Kind("list[int]", "a list of integers", "the list", _few_values),
    "sorted_ints": Kind("list[int]", "a sorted list of integers", "the list", _sorted_ints),
    "floats": Kind("list[float]", "a list of numbers", "the list", _floats),
    "words": Kind("list[str]", "a list of strings", "the list", _words),
    "letters": Kind("list[str]", "a list of letters", "the list",
                    lambda rng: [rng.choice("abcd") for _ in range(rng.randint(3, 7))]),
    "text": Kind("str", "a string", "the string", _sentence),
    "word": Kind("str", "a word", "the word", lambda rng: rng.choice(WORDS)),
    "mixed": Kind("str", "a string", "the string", _mixed),
    "char": Kind("str", "a character", "", lambda rng: rng.choice("aeinorst")),
    "pair": Kind("str", "a string", "", lambda rng: "".join(rng.choice("aeilnort") for _ in range(2))),
    "bits": Kind("str", "a string of zeros and ones", "the string",
                 lambda rng: "".join(rng.choice("01") for _ in range(rng.randint(3, 8)))),
    "digits": Kind("str", "a string of digits", "the string",
                   lambda rng: str(rng.randint(100, 9999999))),
    "int": Kind("int", "an integer", "", _int(-50, 150)),
    "natural": Kind("int", "a number from 0 on", "", _int(0, 12)),
    "positive": Kind("int", "a positive number", "", _int(1, 150)),
    "large": Kind("int", "a positive number", "", _int(10, 99999)),
    "small": Kind("int", "a positive number", "", _int(1, 6)),
    "base": Kind("int", "a base from 2 to 9", "", _int(2, 9)),
    "size": Kind("int", "a positive number", "", _int(2, 4)),
    "limit": Kind("int", "an integer", "", _int(0, 30)),
    "length": Kind("int", "a length", "", _int(3, 7)),
    "length_above": Kind("int", "an integer", "", _int(13, 60)),
    "seconds": Kind("int", "a number of seconds", "", _int(0, 20000)),
    "year": Kind("int", "a year", "", _int(1890, 2110)),
    "float": Kind("float", "a number", "", lambda rng: rng.randint(-40, 200) / 4),
    "price": Kind("float", "a price", "", lambda rng: rng.randint(4, 800) / 4),
    "percent": Kind("int", "a percentage", "", lambda rng: rng.randrange(5, 100, 5)),
    "flag": Kind("bool", "a boolean", "", lambda rng: rng.random() < 0.5),
    "counts": Kind("dict[str, int]", "a dictionary from names to numbers", "the dictionary", _counts),
    "pairs": Kind("list[tuple[str, int]]", "a list of pairs of a name and a number", "the list", _pairs),
    "people": Kind("list[dict]", 'a list of dictionaries with the keys "name" and "age"', "the list", _people),
    "intervals": Kind("list[tuple[int, int]]", "a list of intervals (start, end)", "the list", _intervals),
    "interval": Kind("tuple[int, int]", "an interval (start, end)", "", _interval),
    "matrix": Kind("list[list[int]]", "a matrix as a list of rows", "the matrix", _matrix),
    "square": Kind("list[list[int]]", "a square matrix as a list of rows", "the matrix", _square),
    "nested": Kind("list", "a nested list of integers", "the list", _nested),
    "point": Kind("tuple[int, int]", "a point (x, y)", "",
                  lambda rng: (rng.randint(-5, 9), rng.randint(-5, 9))),
}  # fmt: skip
"""Kinds by the name that signatures of templates use."""
