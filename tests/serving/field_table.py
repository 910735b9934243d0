"""`python -m tests.serving.field_table docs/fields.md` writes that page."""

import sys
import textwrap
from collections import defaultdict
from pathlib import Path

from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
from serving.http.fields import Fields, Ignored, Refused, declarations, places_of
from serving.http.messages_fields import MessagesFields
from serving.http.responses_fields import ResponsesFields

_ROUTES: dict[str, type[Fields]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/responses": ResponsesFields,
    "/v1/messages": MessagesFields,
}
_HEAD = """\
# Fields of the HTTP APIs

`python -m tests.serving.field_table docs/fields.md` writes this page from the declarations in \
`serving/http`. A refusal
says why, and what to send instead. [serving.md](serving.md#fields-of-the-http-apis) has the rules.
"""


def _sections(root: type[Fields]) -> str:
    """The fields of a route by what is done with them."""
    paths = defaultdict(list)
    for model, place in places_of(root).items():
        for name, mark in declarations(model):
            match mark:
                case Ignored():
                    status = "ignored"
                case Refused() if mark.neutral:
                    status = "refused, but for values without effect"
                case Refused():
                    status = "refused"
                case None:
                    status = "honoured"
            paths[status].append(f"`{place}{name}`")
    whole = dict(break_long_words=False, break_on_hyphens=False)
    fill = lambda text: textwrap.fill(text, width=118, subsequent_indent="  ", **whole)
    return "\n".join(fill(f"- {status}: {', '.join(paths[status])}") for status in sorted(paths))


def page() -> str:
    """The text of docs/fields.md."""
    routes = [f"\n## {path}\n\n{_sections(root)}\n" for path, root in _ROUTES.items()]
    return _HEAD + "".join(routes)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
