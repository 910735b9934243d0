"""Parses replies that are text with markers; see `formats`."""

from serving.replies.arguments import NoCall, Tools
from serving.replies.formats import Format
from serving.replies.lexer import Lexer
from serving.replies.parts import ReplyPart
from serving.replies.readers import Reader
from serving.replies.spacing import Spacing


class MarkedText:
    """Turns the growing text of a reply into its parts. Each piece of text is looked at once.

    A region that holds no call is text, with its markers, exactly as the model wrote it. See
    `Spacing` for white space beside regions.

    Args:
      tools: the request's tools; None: regions of calls are text.
      is_reasoning: whether the prompt ends within the reasoning.
    """

    def __init__(self, form: Format, *, tools: Tools | None, is_reasoning: bool = False):
        self._form, self._tools = form, tools
        self._lexer = Lexer(form.all_markers)
        self._is_reasoning = is_reasoning
        self._reader: Reader | None = None
        self._region: list[str] = []
        self._spacing = Spacing()
        if is_reasoning:
            self._spacing.restart()

    def add(self, text: str) -> ReplyPart:
        """Appends text; returns the new part that later text cannot change."""
        return self._take(self._lexer.add(text))

    def finish(self) -> ReplyPart:
        """Returns the rest at the end of the reply."""
        part = self._take(self._lexer.finish())
        if self._reader is not None:
            part += self._close("")
        return part if self._is_reasoning else part + ReplyPart(self._spacing.finish())

    def _take(self, pieces: list[str]) -> ReplyPart:
        if len(pieces) == 1:
            return self._one(pieces[0])
        return ReplyPart.joined([self._one(piece) for piece in pieces])

    def _one(self, piece: str) -> ReplyPart:
        if self._reader is not None:
            self._region.append(piece)
            size = self._reader.take(piece)
            return ReplyPart() if size is None else self._close(piece[size:])
        if self._is_reasoning:
            return self._reasoning(piece)
        if self._form.reasoning and piece == self._form.reasoning[0] and not self._spacing.has_text:
            self._is_reasoning = True
            self._spacing.restart()
            return ReplyPart()
        make_reader = self._form.readers.get(piece) if self._tools is not None else None
        if make_reader and (piece not in self._form.at_start or not self._spacing.has_text):
            self._reader, self._region = make_reader(), [piece]
            self._reader.take(piece)
            return ReplyPart()
        return ReplyPart(self._spacing.add(piece))

    def _reasoning(self, piece: str) -> ReplyPart:
        if piece != self._form.reasoning[1]:
            return ReplyPart(reasoning=self._spacing.add(piece))
        self._is_reasoning = False
        self._spacing.restart()
        return ReplyPart()

    def _close(self, rest: str) -> ReplyPart:
        """Ends the region of calls, of which `rest` is not a part."""
        reader, self._reader = self._reader, None
        region, self._region = "".join(self._region), []
        try:
            part = ReplyPart(calls=reader.calls(self._tools))
        except NoCall:
            written = region[: len(region) - len(rest)]
            part = ReplyPart(self._spacing.add(written))
        else:
            self._spacing.region()
        return part + self._one(rest) if rest else part
