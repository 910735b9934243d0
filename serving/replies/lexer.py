"""Splits growing text into markers and the text between them, in linear time."""

import re
from collections.abc import Collection

SPACE = " \t\r\n"
"""White space between the parts of a reply."""


class Lexer:
    """Finds markers in text that arrives in pieces.

    The result depends on the whole text only: the leftmost marker counts, and the end of a piece
    that may be the beginning of a marker is held back. The text between two markers may come in
    several pieces.

    Args:
      markers: none of them is the beginning of another.
    """

    def __init__(self, markers: Collection[str]):
        first = "".join(sorted({re.escape(marker[0]) for marker in markers}))
        whole = "|".join(map(re.escape, sorted(markers)))
        begun = "|".join(sorted(_beginnings(marker) for marker in markers if len(marker) > 1))
        # The lookahead skips most characters at once.
        self._whole = re.compile(f"(?=[{first}])(?P<marker>{whole})")
        self._any = re.compile(f"(?=[{first}])(?:(?P<marker>{whole})|(?:{begun or '(?!)'})\\Z)")
        self._held = ""

    def add(self, text: str) -> list[str]:
        """Markers and pieces of other text, none empty, that later text cannot change."""
        return self._split(self._any, self._held + text)

    def finish(self) -> list[str]:
        """The rest at the end of the text."""
        return self._split(self._whole, self._held)

    def _split(self, pattern: re.Pattern, text: str) -> list[str]:
        self._held, pieces, start = "", [], 0
        for match in pattern.finditer(text):
            if match.start() > start:
                pieces.append(text[start : match.start()])
            start = match.end()
            if match["marker"] is None:
                self._held = match[0]
            else:
                pieces.append(match[0])
        if start < len(text):
            pieces.append(text[start:])
        return pieces


def _beginnings(marker: str) -> str:
    """A pattern of all proper beginnings of a marker, the longest first: "abc" gives a(?:b)?."""
    pattern = ""
    for letter in reversed(marker[:-1]):
        pattern = re.escape(letter) + (f"(?:{pattern})?" if pattern else "")
    return pattern
