"""Grammars in Lark: their literals, and the JSON schemas within them."""

import json

import pytest

from peagle_jax import ConfigError
from peagle_jax.engine.structured.lark import literal, named, with_schemas
from peagle_jax.structured import Structured


def test_a_choice_may_have_any_character(grammars, tokenizer):
    choices = ["\x7f", *map(chr, range(1, 32)), 'a"\\/', "é", "\x80\x9f", "\u2028\ufeff", "😀"]
    for choice in choices:
        matcher = grammars.compile(Structured.choice([choice, "other"]))
        matcher.consume(tokenizer.encode(choice, special=False))
        assert matcher.error is None
        assert matcher.is_complete, repr(choice)
    assert json.loads(literal("".join(choices))) == "".join(choices)


def test_schemas_within_a_grammar_are_found_and_nothing_else_is():
    found = []

    def change(schema: dict) -> dict:
        found.append(schema)
        return {"a": 2} if schema == {"a": 1} else schema

    grammar = r"""start: "%json {\"a\": 1}" x // %json {"a": 1}
x: /%json {"a": 1}/ <|%json"|> %json {"a": 1} | %json
  {"b": "// \"%json"}| %json {"a
y: %json{"c": {}} // "%json {}" """
    written = with_schemas(grammar, change)
    assert found == [{"a": 1}, {"b": '// "%json'}, {"c": {}}]
    assert written == grammar.replace('<|%json"|> %json {"a": 1}', '<|%json"|> %json {"a": 2}')


@pytest.mark.parametrize("around", [False, True])
def test_schemas_within_a_grammar_obey_the_rules_of_schemas(grammars, around):
    text = 'start: "x" %json {"items": {"const": 9007199254740993}} // parameters of edit\n'
    structured = Structured.grammar(text)
    if around:
        structured = Structured("regex", "a", around=text.replace("start:", "start: @text | "))
    with pytest.raises(ConfigError) as caught:
        grammars.compile(structured)
    assert caught.value.rule.startswith(
        "parameters of edit: #/items/const: 9007199254740993 cannot"
    )


def test_llguidances_reasons_name_the_schema_at_their_line(grammars):
    text = 'start: "x" value\n\nvalue: %json {"uniqueItems": true} // parameters of edit'
    with pytest.raises(ConfigError) as caught:
        grammars.compile(Structured.grammar(text))
    want = 'parameters of edit: failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]'
    assert caught.value.rule == want
    for reason in ("at 1(2): no", "at 99(1): no", "no"):
        assert named(reason, [text, ""]) == reason
