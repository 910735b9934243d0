"""Marks each token of a text by its fate: in a terminal by colour and style, elsewhere by
characters.

A round of drafts ["return", " x", "[", "i"] and tokens ["return", " x", "\\n"] is [return][
x]{-[-}{+\\n+} in characters: two accepted drafts, the refused draft, and the target's correction.
What the head drafted behind a refused draft continues another text, and is not shown.
"""

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from peagle_jax.engine.host.request import Round
from peagle_jax.text.tokenizer import Detokenizer, TextStream, Tokenizer


class Fate(enum.Enum):
    """Outcome of a token."""

    ACCEPTED = "an accepted draft"
    REFUSED = "the draft that the target refused"
    CORRECTION = "the target's token in its place"
    BONUS = "the target's token after all drafts"
    PLAIN = "a token without drafts"


Mark = Callable[[str, Fate], str]
"""Marks the text of one token."""

_CHARACTERS = {
    Fate.ACCEPTED: ("[", "]"),
    Fate.REFUSED: ("{-", "-}"),
    Fate.CORRECTION: ("{+", "+}"),
    Fate.BONUS: ("(", ")"),
}
_STYLES = {  # attribute, name of the attribute, colour: SGR of ECMA-48
    Fate.ACCEPTED: (4, "underlined", 32),
    Fate.REFUSED: (9, "struck out", 31),
    Fate.CORRECTION: (1, "bold", 33),
    Fate.BONUS: (3, "italic", 35),
}


def mark_for(stream: TextIO, environ: Mapping[str, str]) -> Mark:
    """Styles for a terminal, without colours if NO_COLOR is set; characters for files and simple
    terminals."""
    if not _is_styled(stream, environ):
        return _with_characters
    has_colours = not environ.get("NO_COLOR")  # an empty value counts as unset: no-color.org

    def mark(text: str, fate: Fate) -> str:
        if fate not in _STYLES:
            return text
        attribute, _, colour = _STYLES[fate]
        codes = f"{attribute};{colour}" if has_colours else f"{attribute}"
        return f"\x1b[{codes}m{text}\x1b[0m"

    return mark


def legend(stream: TextIO, environ: Mapping[str, str]) -> str:
    """One line that explains the marks of `mark_for`."""
    if not _is_styled(stream, environ):
        return "; ".join(_with_characters(fate.value, fate) for fate in _CHARACTERS)
    return "; ".join(f"{name}: {fate.value}" for fate, (_, name, _) in _STYLES.items())


def fates(round: Round | None, num_tokens: int) -> list[Fate]:
    """The fate of each token of an update; `round` is None if prefill sampled the token."""
    if round is None or not round.drafts:
        return [Fate.PLAIN] * num_tokens
    own = Fate.BONUS if round.accepted == len(round.drafts) else Fate.CORRECTION
    return [Fate.ACCEPTED] * round.accepted + [own] * (num_tokens - round.accepted)


class MarkedText:
    """The marked text of one request, as it streams.

    Args:
      tokenizer: None shows token ids.
      mark: None leaves the text as it is.
      stops, min_tokens: as `TextStream` takes them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        mark: Mark | None,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        self._tokenizer, self._mark = tokenizer, mark
        self._pieces = Detokenizer(tokenizer) if tokenizer else None
        # It withholds text that may become a stop string.
        self._text = TextStream(tokenizer, stops, min_tokens=min_tokens) if tokenizer else None
        self._held: deque[tuple[str, Fate]] = deque()

    def add(self, tokens: Sequence[int], round: Round | None, *, is_last: bool) -> str:
        """Appends the tokens of an update; returns the new text that is final, with marks."""
        if self._text is None:
            final = "".join(f" {token}" for token in tokens)
        else:
            final = self._text.add(tokens) + (self._text.finish() if is_last else "")
        if self._mark is None:
            return final
        for token, fate in zip(tokens, fates(round, len(tokens)), strict=True):
            if fate is Fate.CORRECTION:
                self._held.append((self._name(round.drafts[round.accepted]), Fate.REFUSED))
            self._held.append((self._piece(token), fate))
        if is_last and self._pieces is not None:
            self._held.append((self._pieces.flush(), Fate.PLAIN))
        return self._take(len(final))

    def _take(self, num_characters: int) -> str:
        """The first characters of what is held, marked; refused drafts do not count."""
        parts = []
        while self._held and num_characters:
            text, fate = self._held.popleft()
            if fate is Fate.REFUSED:
                parts.append(self._mark(_visible(text), fate))
                continue
            taken, rest = text[:num_characters], text[num_characters:]
            num_characters -= len(taken)
            parts.append(self._mark(taken, fate) if taken else "")
            if rest:
                self._held.appendleft((rest, fate))
        return "".join(parts)

    def _piece(self, token: int) -> str:
        return f" {token}" if self._pieces is None else self._pieces.add([token])

    def _name(self, token: int) -> str:
        return str(token) if self._tokenizer is None else self._tokenizer.name_of(token)


def _is_styled(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM") != "dumb"


def _with_characters(text: str, fate: Fate) -> str:
    begin, end = _CHARACTERS.get(fate, ("", ""))
    return f"{begin}{text}{end}"


def _visible(text: str) -> str:
    """A refused draft on one line."""
    return text.replace("\n", "↵").replace("\t", "⇥")
