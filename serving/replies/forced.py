"""Grammars of replies that must be calls, for `tool_choice` required or a named function."""

import json
from collections.abc import Callable, Mapping, Sequence

from peagle_jax.text import Tokenizer

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces as in models' own calls. Otherwise a model may write white space for ever."""
_TYPES_OF_JSON = {"integer", "number", "boolean", "object", "array", "null"}

Grammar = Callable[[Tokenizer, Sequence[dict], bool], str]
"""Makes a grammar in llguidance's dialect of Lark from the tokenizer, the tools that may be called, and whether
several calls may follow each other."""


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """A terminal: a special token, or text."""
    special = tokenizer.special_id(text)
    return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"


def _json(schema: Mapping[str, object]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE}, ensure_ascii=False)


def _parameters(tool: dict) -> dict:
    given = tool["function"].get("parameters") or {}
    return {"type": "object", **given}


def _named(tool: dict, key: str) -> dict:
    """The schema of a call as a JSON object, with the arguments under `key`."""
    schema = {name: value for name, value in _parameters(tool).items() if name != "$defs"}
    definitions = {name: value for name, value in _parameters(tool).items() if name == "$defs"}
    return definitions | {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _is_json(kind: object) -> bool:
    """Whether a value of a schema's type is written as JSON, and not as plain text."""
    kinds = kind if isinstance(kind, list) else [kind]
    return bool(kinds) and all(isinstance(one, str) and one in _TYPES_OF_JSON for one in kinds)


def _rules(start: str, calls: Sequence[str]) -> str:
    names = " | ".join(f"call_{place}" for place in range(len(calls)))
    rules = (f"call_{place}: {call}" for place, call in enumerate(calls))
    return "\n".join([start, f"call: {names}", *rules])


def json_calls(key: str, opening: str = "", closing: str = "") -> Grammar:
    """Calls as JSON objects, each between two texts; without texts there is one call."""

    def grammar(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
        one = f"{json.dumps(opening)} call {json.dumps(closing)}" if opening else "call"
        start = (
            f'start: one ("\\n" one)*\none: {one}' if is_parallel and opening else f"start: {one}"
        )
        return _rules(start, [_json(_named(tool, key)) for tool in tools])

    return grammar


def xml_calls(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    """Qwen3-Coder's calls: required parameters in their order, then others."""
    one = '"<tool_call>\\n" call "</tool_call>"'
    start = f'start: one ("\\n" one)*\none: {one}' if is_parallel else f"start: {one}"
    calls, values = [], ['text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/']
    for tool in tools:
        schema = _parameters(tool)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        required = dict.fromkeys(
            one for one in required if isinstance(one, str) and one in properties
        )
        written = {}
        for name, value in properties.items():
            opening = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
            if isinstance(value, dict) and _is_json(value.get("type")) and "$ref" not in str(value):
                values.append(f"value_{len(values)}: {_json(value)}")
                written[name] = f'{opening} value_{len(values) - 1} "\\n</parameter>\\n"'
            else:
                written[name] = f"{opening} text"
        others = " | ".join(text for name, text in written.items() if name not in required)
        head = json.dumps(f"<function={tool['function']['name']}>\n")
        parts = [head, *(written[name] for name in required), *([f"({others})*"] if others else [])]
        calls.append(" ".join([*parts, '"</function>\\n"']))
    return "\n".join([_rules(start, calls), *values])


def harmony_call(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    """GPT-OSS: reasoning, then one message to a function."""
    mark = lambda name: _literal(tokenizer, f"<|{name}|>")
    start = (
        f'start: thought* call\nthought: {mark("channel")} "analysis" {mark("message")} text '
        f'{mark("end")} {mark("start")} "assistant"\ntext: /(.|\\n)*/'
    )
    is_marked = tokenizer.special_id("<|constrain|>") is not None
    kind = f'" " {mark("constrain")} "json"' if is_marked else '" json"'
    calls = [
        f"{mark('channel')} {json.dumps('commentary to=functions.' + tool['function']['name'])} "
        f"{kind} {mark('message')} {_json(_parameters(tool))}"
        for tool in tools
    ]
    return _rules(start, calls)
