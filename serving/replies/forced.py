"""Grammars of replies with calls: those that must be calls (`tool_choice` required or a named
function), those that may have calls, which then satisfy the schemas of strict functions, and those
that are calls or a constrained text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peagle_jax.engine.structured import lark
from peagle_jax.text.tokenizer import Tokenizer
from serving.replies.arguments import types_of

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces as in models' own calls. Otherwise a model may write white space without end."""
_TYPES_OF_JSON = {"integer", "number", "boolean", "object", "array", "null"}

_DEFINITIONS = ("$defs", "definitions")
"""Where a schema's references point to."""
_WHOLE = "__tool__"
"""Name of a tool's whole schema among the definitions of one parameter."""
_VALUES = ("const", "enum", "default", "examples")
"""Keys of a schema whose values are no schemas."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
"""Keys of a schema whose values map names, also such as `default`, to schemas."""
_TEXT = "TEXT: /(.|\\n)*/"

Grammar = Callable[[Tokenizer, Sequence[dict], bool], str]
"""Makes a grammar in llguidance's dialect of Lark from the tokenizer, the tools that may be called,
and whether several calls may follow each other."""


@dataclass(frozen=True)
class CallGrammars:
    """The grammars of one format: of replies that must be calls, of texts that may have calls, and
    of replies that are calls or what `@text` stands for, see `Structured`."""

    must: Grammar
    may: Grammar
    either: Grammar


def _either(must: Grammar) -> Grammar:
    """Calls, or `@text`."""

    def grammar(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
        calls = must(tokenizer, tools, is_parallel).removeprefix("start:")
        return f"start: calls | @text\ncalls:{calls}"

    return grammar


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """A terminal: a special token, or text."""
    special = tokenizer.special_id(text)
    return lark.literal(text) if special is None else f"<[{special}]>"


def _json(schema: Mapping[str, object], tool: dict) -> str:
    """The schema at the end of a line of a grammar; the comment names it in errors."""
    text = json.dumps({**schema, "x-guidance": _STYLE}, ensure_ascii=False)
    return f"%json {text} // parameters of {tool['function']['name']}"


def _parameters(tool: dict) -> dict:
    """The schema of a call's arguments, which are an object, whatever else it allows."""
    given = tool["function"].get("parameters") or {}
    types = given.get("type", "object")
    is_object = isinstance(types, list) and "object" in types
    return {**given, "type": "object" if is_object else types}


def _named(tool: dict, key: str) -> dict:
    """The schema of a call as a JSON object, with the arguments under `key`."""
    given = _moved(_parameters(tool), f"properties/{key}")
    schema = {name: value for name, value in given.items() if name not in _DEFINITIONS}
    return _definitions(given) | {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: object, place: str) -> object:
    """A schema that will stand at `place` of another: references to parts of it point there.

    References to definitions stay, because these move to the root.
    """
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            moved[key] = value if key in _VALUES else _moved(value, place)
    match schema.get("$ref"):
        case str(target) if target == "#" or target.startswith("#/"):
            if target.split("/")[1:2] not in [[name] for name in _DEFINITIONS]:
                moved["$ref"] = f"#/{place}{target[1:]}"
    return moved


def _definitions(schema: Mapping[str, object]) -> dict:
    """The definitions that references within a schema may name."""
    return {name: schema[name] for name in _DEFINITIONS if name in schema}


def _rules(start: str, calls: Sequence[str]) -> str:
    names = " | ".join(f"call_{place}" for place in range(len(calls)))
    rules = (f"call_{place}: {call}" for place, call in enumerate(calls))
    return "\n".join([start, f"call: {names}", *rules])


def json_calls(key: str, opening: str = "", closing: str = "", marker: str = "") -> CallGrammars:
    """Calls as JSON objects, each between two texts; without texts there is one call, the whole
    reply.

    Args:
      marker: a special token that may come before a call without texts.
    """

    def must(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
        one = f"{json.dumps(opening)} call {json.dumps(closing)}" if opening else "call"
        start = (
            f'start: one ("\\n" one)*\none: {one}' if is_parallel and opening else f"start: {one}"
        )
        return _rules(start, [_json(_named(tool, key), tool) for tool in tools])

    def may(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
        if opening:
            head = opening.rstrip()
            rest = f"{json.dumps(opening.removeprefix(head))} call {json.dumps(closing)}"
            start = _tagged({head: rest}, is_parallel)
        else:
            # A reply is a call if it begins as one.
            special = tokenizer.special_id(marker)
            start = "start: call | other" + ("" if special is None else f" | <[{special}]> call")
            start += "\nother: /([^{ \\t\\r\\n](.|\\n)*)?/"
        return _rules(start, [_json(_named(tool, key), tool) for tool in tools])

    return CallGrammars(must, may, _either(must))


def _tagged(tags: Mapping[str, str], is_parallel: bool) -> str:
    """The rule of a text with tags: after each of these texts the rest of its tag must follow."""
    names = [f"tag_{place}" for place in range(len(tags))]
    rules = [f"start: ({' | '.join(names)}){'*' if is_parallel else '?'} rest", "rest: TEXT", _TEXT]
    for name, (opening, rest) in zip(names, tags.items(), strict=True):
        rules += [f"{name}_head[lazy]: TEXT {json.dumps(opening)}", f"{name}: {name}_head {rest}"]
    return "\n".join(rules)


def _xml_must(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    one = '"<tool_call>\\n<function=" call "</tool_call>"'
    start = f'start: one ("\\n" one)*\none: {one}' if is_parallel else f"start: {one}"
    return _xml_rules(start, tools)


def _xml_may(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    # A call may come without its wrapper.
    tags = {"<tool_call>": '"\\n<function=" call "</tool_call>"', "<function=": "call"}
    return _xml_rules(_tagged(tags, is_parallel), tools)


xml_calls = CallGrammars(_xml_must, _xml_may, _either(_xml_must))


def _xml_rules(start: str, tools: Sequence[dict]) -> str:
    """Qwen3-Coder's calls after `<function=`: required parameters in their order, then others."""
    calls = []
    values = [
        'text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/',
        'any_parameter: "<parameter=" /[^>\\n]+/ ">\\n" text',
    ]
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
            opening = lark.literal(f"<parameter={name}>\n")
            rule = _xml_value(value, schema, tool)
            if rule is None:
                written[name] = f"{opening} text"
            else:
                values.append(f"value_{len(values)}: {rule}")
                written[name] = f'{opening} value_{len(values) - 1} "\\n</parameter>\\n"'
        others = " | ".join(text for name, text in written.items() if name not in required)
        if not isinstance(schema.get("properties"), dict):
            others = "any_parameter"
        head = json.dumps(f"{tool['function']['name']}>\n")
        parts = [head, *(written[name] for name in required), *([f"({others})*"] if others else [])]
        calls.append(" ".join([*parts, '"</function>\\n"']))
    return "\n".join([_rules(start, calls), *values])


def _xml_value(value: object, schema: dict, tool: dict) -> str | None:
    """The rule of a parameter's value; None: a text that ends at the next closing tag."""
    if not isinstance(value, dict):
        return None
    choices = value.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return " | ".join(map(lark.literal, choices))
    types = types_of(value, schema)
    if not types or not _TYPES_OF_JSON.issuperset(types):
        return None
    return _json(_alone(value, schema) if "$ref" in str(value) else value, tool)


def _alone(value: dict, schema: dict) -> dict:
    """The schema of one parameter with all that its references point to."""
    place = f"$defs/{_WHOLE}"
    whole = _moved(schema, place)
    names, value = _definitions(whole), _moved(value, place)
    if _WHOLE in str(names) or _WHOLE in str(value):
        given = names.get("$defs")
        rest = {name: part for name, part in whole.items() if name not in _DEFINITIONS}
        names["$defs"] = (given if isinstance(given, dict) else {}) | {_WHOLE: rest}
    return names | value


def _harmony_must(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    return _harmony_rules(tokenizer, tools, "start: analysis* call")


def _harmony_may(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    mark = _mark(tokenizer)
    return _harmony_rules(
        tokenizer,
        tools,
        "start: (analysis | preamble)* (call | final)\n"
        f"preamble: {_message(tokenizer, 'commentary')}\n"
        f'final: {mark("channel")} "final" {mark("message")} text',
    )


def _harmony_either(tokenizer: Tokenizer, tools: Sequence[dict], is_parallel: bool) -> str:
    mark = _mark(tokenizer)
    final = f'final: {mark("channel")} "final" {mark("message")} @text'
    return _harmony_rules(tokenizer, tools, f"start: analysis* (call | final)\n{final}")


harmony_calls = CallGrammars(_harmony_must, _harmony_may, _harmony_either)
"""GPT-OSS: reasoning, then one message: to a function, or to the user."""


def _mark(tokenizer: Tokenizer) -> Callable[[str], str]:
    return lambda name: _literal(tokenizer, f"<|{name}|>")


def _message(tokenizer: Tokenizer, channel: str) -> str:
    """A message after which another follows."""
    mark = _mark(tokenizer)
    text = f"{mark('channel')} {json.dumps(channel)} {mark('message')} text"
    return f'{text} {mark("end")} {mark("start")} "assistant"'


def _harmony_rules(tokenizer: Tokenizer, tools: Sequence[dict], start: str) -> str:
    mark = _mark(tokenizer)
    rules = f"{start}\nanalysis: {_message(tokenizer, 'analysis')}\ntext: /(.|\\n)*/"
    is_marked = tokenizer.special_id("<|constrain|>") is not None
    kind = f'" " {mark("constrain")} "json"' if is_marked else '" json"'
    calls = [
        f"{mark('channel')} {json.dumps('commentary to=functions.' + tool['function']['name'])} "
        f"{kind} {mark('message')} {_json(_parameters(tool), tool)}"
        for tool in tools
    ]
    return _rules(rules, calls)
