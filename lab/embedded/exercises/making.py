"""A document of a template: names are drawn, the function runs, examples show results."""

import builtins
import keyword
import re
from collections.abc import Callable
from random import Random
from typing import Any

from lab.embedded.exercises.phrasing import Example, docstring, example_lines, sentences
from lab.embedded.exercises.template import PLACEHOLDER, Template
from lab.embedded.exercises.vocabulary import NAMES, PARTNERS

_MAX_EXAMPLE = 88
_TYPING = {"list[": "List[", "dict[": "Dict[", "tuple[": "Tuple[", "set[": "Set["}
_RESERVED = {*dir(builtins), *keyword.kwlist}


class Drawn(dict):
    """Values of placeholders; a variable's name is drawn where it is first asked for."""

    def __init__(self, template: Template, rng: Random):
        self._taken = set(template.words | _RESERVED)
        self._rng = rng
        for slot, options in template.slots.items():
            self[slot] = rng.choice(options)
        for param, _ in template.params:
            self[param]  # parameters are named first

    def __missing__(self, placeholder: str) -> str:
        listed = NAMES.get(placeholder, placeholder).split()
        partner = PARTNERS.get(placeholder)
        if partner in self and self[partner] in NAMES[partner].split():
            listed = listed[NAMES[partner].split().index(self[partner]) :][:1]
        names = [n for n in listed if n not in self._taken]
        name = self._rng.choice(names) if names else f"{placeholder}_"
        self._taken.add(name)
        self[placeholder] = name
        return name


def fill(text: str, values: dict[str, Any]) -> str:
    """Puts values in place of placeholders; a value may hold placeholders itself."""

    def value(match: re.Match) -> str:
        found = values[match[1]]
        return str(getattr(found, match[2]) if match[2] else found)

    while PLACEHOLDER.search(text):
        text = PLACEHOLDER.sub(value, text)
    return text


def _in_words(template: Template, drawn: Drawn, rng: Random) -> dict[str, Any]:
    """Values for docstrings: a parameter is `numbers`, or "the list" where there is one."""
    shorts = [kind.short for _, kind in template.params]
    quote = "`" if rng.random() < 0.35 else ""
    words = {}
    for param, kind in template.params:
        plain = kind.short and shorts.count(kind.short) == 1 and rng.random() < 0.5
        words[param] = kind.short if plain else f"{quote}{drawn[param]}{quote}"
    return dict(drawn) | words


def _header(template: Template, name: str, drawn: Drawn, rng: Random) -> tuple[str, str]:
    """An import that type hints need, and the line `def`; hints stand there half of the time."""
    names = [drawn[param] for param, _ in template.params]
    if rng.random() < 0.45:
        return "", f"def {name}({', '.join(names)}):"
    hints = [kind.hint for _, kind in template.params]
    head = ", ".join(f"{n}: {h}" for n, h in zip(names, hints, strict=True))
    head = f"def {name}({head}) -> {template.returns}:"
    used = [new for old, new in _TYPING.items() if old in head]
    if not used or "| None" in head or "Iterator" in head or rng.random() < 0.6:
        above = "from collections.abc import Iterator" if "Iterator" in head else ""
        return above, head
    for old, new in _TYPING.items():
        head = head.replace(old, new)
    return f"from typing import {', '.join(sorted(new[:-1] for new in used))}", head


def _calls(template: Template, name: str, function: Callable, rng: Random, count: int) -> list:
    """Runs the function on drawn arguments; at most `count` examples."""
    shows: dict[str, Example] = {}
    spare = []
    namespace = {name: function}
    for _ in range(2 * count + 1):
        args = ", ".join(repr(kind.draw(rng)) for _, kind in template.params)
        call = template.show.format(f"{name}({args})")
        result = repr(eval(call, namespace))
        if len(call) > _MAX_EXAMPLE or len(result) > _MAX_EXAMPLE - 20:
            continue
        if result in shows:
            spare.append(Example(call, result))
        shows.setdefault(result, Example(call, result))
    distinct = {e.call: e for e in [*shows.values(), *spare]}
    return list(distinct.values())[:count]


def _before(hints: str, above: str) -> str:
    """What stands above the function, with two empty lines after it; imports are together."""
    imports = [line for line in above.splitlines() if line.startswith(("from ", "import "))]
    helper = above[sum(len(line) + 1 for line in imports) :].strip("\n")
    # `import a` stands before `from a import b`.
    top = sorted([*imports, *([hints] if hints else [])], key=lambda line: (line[0] == "f", line))
    return "".join(f"{part}\n\n\n" for part in ("\n".join(top), helper) if part)


def indented(body: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in body.splitlines())


def document(template: Template, rng: Random) -> str:
    """One function with its docstring, as source text that ends with a newline.

    Raises:
      Exception: whatever the function raises on its own examples, which is a fault of the template.
    """
    drawn = Drawn(template, rng)
    name = fill(rng.choice(template.names), drawn)
    drawn["name"] = name
    above, body = (fill(part, drawn) for part in rng.choice(template.bodies))
    hints, head = _header(template, name, drawn, rng)
    code = f"{head}\n{indented(body)}\n"
    before = _before(hints, above)
    namespace = {"__name__": "exercise"}
    exec(compile(before + code, name, "exec"), namespace)
    count = rng.choice((0, 0, 1, 1, 2, 2, 3))
    examples = _calls(template, name, namespace[name], rng, count)
    words = _in_words(template, drawn, rng)
    notes = [note for note in template.notes if rng.random() < 0.4]
    params = [(drawn[param], kind) for param, kind in template.params]
    text = sentences(rng.choice(template.docs), notes, name, params, rng)
    doc = docstring(fill(text, words), example_lines(examples, rng), rng)
    return f"{before}{head}\n{doc}\n{indented(body)}\n"
