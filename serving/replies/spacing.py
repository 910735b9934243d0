"""White space between the parts of a reply."""

from serving.replies.lexer import SPACE


class Spacing:
    """Holds white space back until it is known whether it belongs to the text.

    White space at the beginning and the end of reasoning, and between a region of calls and an end
    of the text, is left out. Of the white space on both sides of a region within the text, that
    before it is kept.

    Attributes:
      has_text: whether anything but white space has come since `restart`.
    """

    def __init__(self):
        self.has_text = False
        self._held: list[str] = []
        self._is_after_region = False

    def add(self, text: str) -> str:
        """Appends text; returns what is certain."""
        body = text.strip(SPACE)
        start = text.index(body[0]) if body else len(text)
        if start and not (self._is_after_region and (self._held or not self.has_text)):
            self._held.append(text[:start])
        if not body:
            return ""
        before = "".join(self._held)
        self._held = [text[start + len(body) :]]
        self.has_text, self._is_after_region = True, False
        return before + body

    def region(self) -> None:
        """Marks a region of calls."""
        self._is_after_region = True
        self._held = [one for one in self._held if one] if self.has_text else []

    def restart(self) -> None:
        """Marks the beginning or the end of reasoning."""
        self.has_text, self._is_after_region, self._held = False, True, []

    def finish(self) -> str:
        """The white space at the end of the text."""
        return "" if self._is_after_region else "".join(self._held)
