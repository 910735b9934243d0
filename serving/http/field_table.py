"""The tables of docs/serving.md: what is done with each field of the APIs. `python -m serving.http.field_table FILE`
writes them between their markers."""

import json
import re
import sys
from pathlib import Path

from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
from serving.http.fields import Fields, Ignored, Refused, declarations, places_of
from serving.http.messages_fields import MessagesFields
from serving.http.responses_fields import ResponsesFields

_MARKED = re.compile(r"(<!-- fields -->\n).*(<!-- /fields -->)", re.DOTALL)
_ROUTES: dict[str, type[Fields]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/responses": ResponsesFields,
    "/v1/messages": MessagesFields,
}


def table(root: type[Fields]) -> str:
    """The table of a route's fields: a row for those with the same reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for model, place in places_of(root).items():
        for name, mark in declarations(model):
            status, values = "honoured", ()
            match mark:
                case Ignored():
                    status, values = "ignored", mark.met
                case Refused():
                    status, values = "refused", mark.neutral
            listed = ", ".join(json.dumps(value) for value in values)
            path = f"`{place}{name}`" + (f" (unless {listed})" if listed else "")
            rows.setdefault((status, mark.reason if mark else ""), []).append(path)
    lines = [
        f"| {status} | {reason} | {', '.join(paths)} |"
        for (status, reason), paths in sorted(rows.items())
    ]
    return "\n".join(["| | why | fields |", "|---|---|---|", *lines, ""])


def tables() -> str:
    """The tables of all routes."""
    return "\n".join(f"`{path}`:\n\n{table(root)}" for path, root in _ROUTES.items())


def filled(page: str) -> str:
    """The text of a page with its tables made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{tables()}\n{found[2]}", page)


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    _path.write_text(filled(_path.read_text(encoding="utf-8")), encoding="utf-8")
