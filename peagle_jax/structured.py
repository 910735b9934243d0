"""Structured output of a request: what its text must match. `engine.structured.grammar` enforces
it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from peagle_jax.errors import ConfigError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
MAX_CHARS = 256 << 10
"""Most characters of a schema or a grammar."""
Reasoning = Literal["none", "optional", "open", "harmony"]


@dataclass(frozen=True)
class Structured:
    """A constraint on the text of one request. Use the class methods to make one.

    Args:
      kind: how `text` is read.
      text: a JSON schema, a regular expression, a JSON list of strings, or a grammar; empty for
        json_object.
      reasoning: what may come before the constrained text. "none": nothing. "optional": at most one
        block of reasoning in the model's markers. "open": the rest of a block that the prompt has
        opened, and its end. "harmony": messages to the channel analysis, then one to the channel
        final, which is constrained (GPT-OSS). None: nothing, and in chats what
        `Grammars.reasoning_after` says of the prompt.
      around: a grammar in llguidance's Lark in which `@text` stands for the constrained text;
        empty: none.
    """

    kind: Kind
    text: str = ""
    reasoning: Reasoning | None = None
    around: str = ""

    @classmethod
    def json_object(cls, whitespace: str | None = None) -> Self:
        """Any JSON object; `whitespace` as for `json_schema`."""
        if whitespace is None:
            return cls("json_object")
        return cls.json_schema({"type": "object"}, whitespace)

    @classmethod
    def json_schema(
        cls, schema: str | bool | Mapping[str, object], whitespace: str | None = None
    ) -> Self:
        """JSON that satisfies a JSON schema, given as an object or as JSON text.

        Args:
          whitespace: a regular expression of what may stand between two tokens of JSON; "" for
            nothing. None: what `x-guidance` in the schema says, by default at most one space.

        Raises:
          ConfigError: `schema` is not JSON, not a schema, or a text that is too long.
        """
        if isinstance(schema, str) and len(schema) > MAX_CHARS:
            # Parsing holds the interpreter's lock: 8 MiB of empty lists take half a second.
            raise _refused(f"{len(schema)} characters are more than {MAX_CHARS}")
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if whitespace is not None and isinstance(schema, Mapping | bool):
                schema = _spaced(schema, whitespace)
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise _refused(f"the schema is not JSON ({error})") from None
        except RecursionError:
            raise _refused("the schema is nested too deeply") from None
        if not isinstance(schema, Mapping | bool):
            raise _refused("the schema must be a JSON object")
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole (syntax of Rust's regex crate)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """One of several strings.

        Raises:
          ConfigError: no strings, or an empty one.
        """
        if isinstance(choices, str) or not choices or not all(choices):
            raise _refused("choice needs at least one string, and none may be empty")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Text of a context-free grammar in llguidance's dialect of Lark, or in GBNF (`root ::=
        ...`)."""
        return cls("grammar", text)


def _spaced(schema: Mapping[str, object] | bool, whitespace: str) -> Mapping[str, object] | bool:
    if schema is False:
        return schema
    schema = {} if schema is True else schema
    style = schema.get("x-guidance")
    style = style if isinstance(style, Mapping) else {}
    return {**schema, "x-guidance": {**style, "whitespace_pattern": whitespace}}


def _refused(rule: str) -> ConfigError:
    return ConfigError.of("structured", rule)
