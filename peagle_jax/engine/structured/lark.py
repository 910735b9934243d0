"""Grammars in llguidance's dialect of Lark: their literals, and the JSON schemas within them."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from peagle_jax.errors import ConfigError

_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>|%json\s*(?=\{)'
)
"""Texts, regular expressions, comments and special tokens; and the keyword before a schema."""
_GBNF_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_COMMENT = re.compile(r"\s*// ([^\n]*)")
_AT_LINE = re.compile(r"at (\d+)\(\d+\): ")
_NAME = re.compile(r'%json .*// ([^"{}]*)$')


def literal(text: str) -> str:
    """A text of a grammar. Lark takes no control character as it is, and JSON leaves U+007F so."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_schemas(grammar: str, change: Callable[[dict], dict]) -> str:
    """Replaces each JSON schema of a grammar by `change(schema)`. Text that is not JSON stays;
    llguidance refuses it.

    Raises:
      ConfigError: of `change`, with the schema's name before its message, see `named`.
    """
    written, begin, place = [], 0, 0
    while match := _PARTS.search(grammar, place):
        place = match.end()
        if not match[0].startswith("%json"):
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, place)
        except ValueError:
            continue
        try:
            changed = change(schema)
        except ConfigError as error:
            comment = _COMMENT.match(grammar, end)
            rule = f"{comment[1]}: {error.rule}" if comment else error.rule
            raise ConfigError.of("structured", rule) from None
        if changed is not schema:
            written += [grammar[begin:place], json.dumps(changed, ensure_ascii=False)]
            begin = end
        place = end
    return "".join([*written, grammar[begin:]])


def twice_defined(gbnf: str) -> str | None:
    """A rule that a grammar in GBNF defines twice: its translation would keep the last definition
    only."""
    rules = Counter(_GBNF_RULE.findall(gbnf))
    return next((name for name, count in rules.items() if count > 1), None)


def by_number(grammar: str, ids: Mapping[str, int]) -> str:
    """The grammar with special tokens by their number, `<[2]>`, instead of their spelling,
    `<|pad|>`."""

    def changed(match: re.Match) -> str:
        return f"<[{ids[match[0]]}]>" if match[0] in ids else match[0]

    return _PARTS.sub(changed, grammar)


def named(reason: str, grammars: Iterable[str]) -> str:
    """llguidance's reason, with the name of the schema at its line instead of the line.

    The comment behind a schema is its name.
    """
    match = _AT_LINE.match(reason)
    if match is None:
        return reason
    line = int(match[1]) - 1
    for grammar in grammars:
        lines = grammar.splitlines()
        name = _NAME.search(lines[line]) if line < len(lines) else None
        if name:
            return f"{name[1]}: {reason[match.end() :]}"
    return reason
