"""A template: the parts of a function from which different exercises are made.

Texts of a template hold placeholders. `<numbers>` is a parameter, a slot, or a variable with one of
the names of `vocabulary.NAMES`; `<test.code>` is a field of the option that is drawn for the slot
`test`; `<name>` is the function.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent

from lab.embedded.exercises.kinds import KINDS, Kind

PLACEHOLDER = re.compile(r"<([a-z]\w*)(?:\.([a-z]+))?>")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Template:
    """Alternatives of which a document takes one each.

    Attributes:
      names: names of the function.
      params: placeholder and kind of each parameter.
      returns: type hint of the result.
      docs: whole descriptions; one that begins with "Return" also gets other beginnings.
      notes: further sentences, true of every description.
      bodies: what stands above the function, and its body.
      show: how an example calls the function; `{}` stands for the call.
      slots: the options of each slot.
      words: names that occur in the bodies, which a variable must not take.
      weight: how often it is taken, beside the others.
    """

    names: tuple[str, ...]
    params: tuple[tuple[str, Kind], ...]
    returns: str
    docs: tuple[str, ...]
    notes: tuple[str, ...]
    bodies: tuple[tuple[str, str], ...]
    show: str
    slots: dict[str, Sequence]
    words: frozenset[str]
    weight: float


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _bodies(text: str) -> tuple[tuple[str, str], ...]:
    """Bodies stand between lines `---`; a line `===` ends what stands above the function."""
    found = []
    for body in re.split(r"^---$", dedent(text), flags=re.M):
        above, _, inside = body.rpartition("\n===\n")
        found.append((above.strip("\n"), inside.strip("\n")))
    return tuple(found)


def template(
    names: str,
    signature: str,
    docs: str,
    bodies: str,
    *,
    notes: str = "",
    show: str = "{}",
    weight: float = 2,
    **slots: Sequence,
) -> Template:
    """Reads a template from its texts.

    Arguments:
      names: names of the function, between spaces.
      signature: `placeholder:kind ... -> type hint of the result`; kinds.KINDS lists the kinds.
      docs: one description a line; a parameter becomes its name, or "the list" and the like.
      bodies: alternatives between lines `---`; imports and helpers above a line `===`.
      notes: one sentence a line.
      show: `list({})` for a generator, for example.
      weight: how often it is taken.
      slots: options by slot: texts, numbers, or tuples with named fields.
    """
    left, _, returns = signature.partition(" -> ")
    params = [part.split(":") for part in left.split()]
    fields = [
        str(getattr(option, "code", option)) for options in slots.values() for option in options
    ]
    return Template(
        names=tuple(names.split()),
        params=tuple((name, KINDS[kind]) for name, kind in params),
        returns=returns,
        docs=_lines(docs),
        notes=_lines(notes) if notes else (),
        bodies=_bodies(bodies),
        show=show,
        slots=slots,
        words=frozenset(_WORD.findall(PLACEHOLDER.sub(" ", bodies + " ".join(fields)))),
        weight=weight,
    )
