"""Schemas of functions in grammars of calls: refused by the place or the name of the function."""

import openai
import pytest

from peagle_jax import ConfigError
from serving.replies.formats import FORMATS
from tests.serving.scripted import TEMPLATE, make_tokenizer
from tests.serving.test_tool_choice import CHAT, HARMONY, admitted, modes


@pytest.fixture
def client(tools_client):
    return tools_client


FORMS = [one.name for one in FORMATS if one.grammars] + ["harmony"]


def function(parameters: dict, name: str = "go", **others) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | others}


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": ["string", "null"]}, {"anyOf": [{"type": "array"}]}],
    ids=str,
)
@pytest.mark.parametrize("choice", ["required", "named", "strict"])
def test_a_function_whose_arguments_are_no_object_is_refused_by_its_place(
    client, parameters, choice
):
    tools = [modes("open"), function(parameters, strict=choice == "strict")]
    named = {"type": "function", "function": {"name": "go"}}
    options = {"required": "required", "named": named, "strict": "auto"}
    with pytest.raises(openai.BadRequestError, match=r"must have the type \"object\"") as caught:
        client.chat.completions.create(
            **CHAT | dict(tools=tools, tool_choice=options[choice], max_tokens=1)
        )
    assert caught.value.param == "tools[1].function.parameters"
    client.chat.completions.create(**CHAT | dict(tools=tools[:1], max_tokens=1))


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_an_object_where_a_schema_allows_more(form, tmp_path):
    special = HARMONY if form == "harmony" else ()
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, special=special)
    _, consumed = admitted(
        tokenizer, form, [function({"type": ["null", "object"]})], must_call=True
    )
    whole = {
        "qwen3": '<tool_call>\n{{"name": "go", "arguments": {0}}}\n</tool_call>',
        "llama3": '{{"name": "go", "parameters": {0}}}',
        "harmony": "<|channel|>commentary to=functions.go <|constrain|>json<|message|>{0}",
    }
    if form in whole:
        assert consumed(whole[form].format('{"a": 1}'))
        assert not consumed(whole[form].format("null"))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "maximum": 2**60}, "/maximum: 1152921504606846976 cannot be held"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_schema_that_cannot_be_enforced_is_named_by_its_function(form, part, reason, tmp_path):
    special = HARMONY if form == "harmony" else ()
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, special=special)
    tools = [modes("open"), function({"type": "object", "properties": {"a": part}})]
    for must_call in (True, False):
        _, consumed = admitted(tokenizer, form, tools, must_call=must_call)
        with pytest.raises(ConfigError) as caught:
            consumed("")
        assert caught.value.rule.startswith("parameters of go: "), caught.value.rule
        assert reason in caught.value.rule


def test_names_and_values_in_calls_may_have_any_character(tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    properties = {"a\x7f": {"enum": ["b\x7f", 'c"']}}
    tools = [function({"properties": properties, "required": ["a\x7f"]})]
    _, consumed = admitted(tokenizer, "qwen3-coder", tools, must_call=True)
    text = (
        "<tool_call>\n<function=go>\n<parameter=a\x7f>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    assert consumed(text.format("b\x7f"))
    assert not consumed(text.format("b"))
