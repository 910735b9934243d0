"""JSON objects that differ in one text alone: what stands around it is encoded once."""

from serving.http.errors import dump

MARK = "\0text\0"
"""Stands for the text in the object that a template is made from."""


class Template:
    """The JSON of an object, with a gap for a text.

    Args:
      content: the object, as `dump` takes it, with `MARK` as the text. Nothing behind the text comes from a client,
        so the last mark is it.
    """

    def __init__(self, content: dict):
        self._before, _, self._after = dump(content).rpartition(dump(MARK))

    def filled(self, text: str) -> bytes:
        """`dump` of the object with `text`."""
        return b"".join((self._before, dump(text), self._after))
