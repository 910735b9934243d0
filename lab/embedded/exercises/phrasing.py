"""Docstrings: beginnings of sentences, layouts, and forms of examples."""

import textwrap
from dataclasses import dataclass
from random import Random

from lab.embedded.exercises.kinds import Kind

_PLAIN = ("Return ", "Return ", "Return ", "Returns ")
_FIND = (*_PLAIN, "Find ", "Compute ", "Get ", "Determine ", "Calculate ", "Give ")
_CHECK = (
    "Return True if ",
    "Returns True if ",
    "Check if ",
    "Check whether ",
    "Return whether ",
    "Tell whether ",
    "Determine whether ",
    "Test if ",
    "Returns whether ",
)
_INDENT = " " * 4
_WIDTH = 92
_SHORT = 76


@dataclass(frozen=True)
class Example:
    """A call and its result, both as source text."""

    call: str
    result: str


def _nouns(params: list[tuple[str, Kind]], quote: str) -> str:
    parts = [f"{kind.noun} {quote}{name}{quote}" for name, kind in params]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _after_return(rest: str, name: str, nouns: str, rng: Random) -> str:
    """A sentence for `Return rest`, with another beginning."""
    if rest.startswith("True if "):
        condition = rest.removeprefix("True if ")
        if rng.random() < 0.6:
            beginning = rng.choice(_CHECK)
            otherwise = (
                ", False otherwise." if " True " in beginning and rng.random() < 0.4 else "."
            )
            return beginning + condition[:-1] + otherwise
    elif rng.random() < 0.6:
        return rng.choice(_FIND if rest.startswith("the ") else _PLAIN) + rest
    return rng.choice(
        (
            f"Given {nouns}, return {rest}",
            f"Given {nouns}, return {rest}",
            f"Take {nouns} and return {rest}",
            f"Takes {nouns} and returns {rest}",
            f"Write a function {name} that returns {rest}",
            f"The function takes {nouns}. It returns {rest}",
            f"You get {nouns}. Return {rest}",
            f"Implement {name}, which returns {rest}",
            f"Return {rest}",
        )
    )


def sentences(
    doc: str, notes: list[str], name: str, params: list[tuple[str, Kind]], rng: Random
) -> str:
    """The description: `doc` with one of its beginnings, and the notes after it."""
    if doc.startswith("Return ") and params:
        nouns = _nouns(params, rng.choice(["", "`", "`"]))
        doc = _after_return(doc.removeprefix("Return "), name, nouns, rng)
    return " ".join([doc, *notes])


def _prompts(examples: list[Example], rng: Random) -> list[str]:
    lines = [line for e in examples for line in (f">>> {e.call}", e.result)]
    return ["Examples:", *lines] if rng.random() < 0.1 else lines


def _prose(examples: list[Example], rng: Random) -> list[str]:
    verb = rng.choice(("returns", "returns", "is", "gives"))
    first, *others = [f"{e.call} {verb} {e.result}" for e in examples]
    beginning = rng.choice(("For example, ", "For example: ", "Example: ", "E.g. "))
    return [f"{beginning}{first}.", *(f"{other}." for other in others)]


def _arrows(examples: list[Example], rng: Random) -> list[str]:
    arrow = rng.choice(("==", "->", "=>", "# =>"))
    lines = [f"{e.call} {arrow} {e.result}" for e in examples]
    title = "Example:" if len(lines) == 1 else "Examples:"
    inner = _INDENT if rng.random() < 0.3 else ""
    return [title, *(inner + line for line in lines)]


def example_lines(examples: list[Example], rng: Random) -> list[str]:
    """Examples in one form; `>>>` is the most frequent, and never shows None."""
    if not examples:
        return []
    if rng.random() < 0.6 and all(e.result != "None" for e in examples):
        return _prompts(examples, rng)
    return rng.choice((_prose, _arrows))(examples, rng)


def docstring(description: str, examples: list[str], rng: Random) -> str:
    """The indented docstring in one of the usual layouts."""
    quotes = "'''" if rng.random() < 0.06 else '"""'
    space = rng.choice(("", "", "", " "))
    if not examples and len(description) <= _SHORT and rng.random() < 0.7:
        return f"{_INDENT}{quotes}{space}{description}{space}{quotes}"
    lines = textwrap.wrap(
        description, rng.choice((72, 80, _WIDTH)), break_long_words=False, break_on_hyphens=False
    )
    gap = [""] if examples and rng.random() < 0.6 else []
    opening = [quotes] if rng.random() < 0.3 else [f"{quotes}{space}{lines.pop(0)}"]
    inside = [*opening, *lines, *gap, *examples, quotes]
    return "\n".join(f"{_INDENT}{line}".rstrip() for line in inside)
