"""Replies that must be calls: grammars of all formats, and a random model under them."""

import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from peagle_jax import ConfigError
from peagle_jax.cli.model_folders import embedded
from peagle_jax.engine.structured.grammar import Grammars
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import Tokenizer
from serving.errors import ServiceError
from serving.http.fields import Reading
from serving.http.tools import ToolFields
from serving.limits import Limits
from serving.replies.formats import FORMATS
from serving.replies.parser import Replies, Reply
from serving.settings import Settings, reply_format_of
from tests.serving.scripted import END, TEMPLATE, make_tokenizer
from tests.serving.test_harmony import SPECIAL

PROPERTIES = {
    "text": {"type": "string"},
    "line": {"type": "integer"},
    "mode": {"enum": ["r", "w"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["line"]}
PARAMETERS["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
EDIT = '{"name": "edit", "arguments": {"text": "é\\n</x>", "line": 3}}'
HARMONY = [f"<|{name}|>" for name in SPECIAL]
ARGUMENTS = '{"text": "é\\n</x>", "line": 3}'
TO_EDIT = f"commentary to=functions.edit <|constrain|>json<|message|>{ARGUMENTS}"
of_qwen = lambda call: f"<tool_call>\n{call}\n</tool_call>"
of_coder = lambda name, *given: (
    f"<tool_call>\n<function={name}>\n"
    + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
    + "</function>\n</tool_call>"
)
CASES = {
    "qwen3": (
        [of_qwen(EDIT), f"{of_qwen(EDIT)}\n{of_qwen('''{"name": "stop", "arguments": {}}''')}"],
        [
            "Hi",
            of_qwen(EDIT.replace("edit", "other")),
            f"<tool_call>\n{EDIT.replace('3', 'x')}",
            EDIT,
        ],
    ),
    "llama3": ([EDIT.replace("arguments", "parameters")], ["Hi", EDIT]),
    "qwen3-coder": (
        [of_coder("edit", ("line", 3), ("text", "é\n</x>")), of_coder("stop")],
        [
            "Hi",
            "<tool_call>\n<function=edit>\n</function>",
            "<tool_call>\n<function=edit>\n<parameter=line>\nx",
        ],
    ),
    "harmony": (
        [
            f"<|channel|>{TO_EDIT}",
            f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>{TO_EDIT}",
        ],
        ["Hi", "<|channel|>final<|message|>Hi", "<|channel|>commentary to=functions.other"],
    ),
}


def admitted(tokenizer, name: str, tools: list[dict], **how):
    """The replies of a format, and a function: does their grammar admit a whole text?"""
    replies, end = Replies(tokenizer, name), tokenizer.special_id(END)
    constraint = replies.calls(tools, is_parallel=True, **how)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [end])

    def consumed(text: str) -> bool:
        matcher = grammars.compile(constraint)
        matcher.consume(tokenizer.encode(text, special=False))
        return matcher.error is None and matcher.is_complete

    return replies, consumed


@pytest.mark.parametrize("name", CASES)
def test_the_grammar_of_a_format_admits_its_calls_and_nothing_else(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, special=HARMONY if name == "harmony" else ())
    replies, consumed = admitted(tokenizer, name, TOOLS, must_call=True)
    accepted, refused = CASES[name]
    for text in accepted:
        assert consumed(text), text
        parser = replies.parsers(Reply([1], True, TOOLS))()
        tokens = tokenizer.encode(text + ("<|call|>" if name == "harmony" else ""))
        parsed = parser.add(tokens) + parser.finish()
        assert parsed.text == ""
        assert parsed.calls[0].name in ("edit", "stop")
        assert json.loads(parsed.calls[0].arguments) in (json.loads(ARGUMENTS), {})
    for text in refused:
        assert not consumed(text), text


TEXTS = {
    "qwen3": (["Hi {", "a < b", "Hi\n{0}", "{0} and {1}."], ["{1}{2}", "<tool_call>Hi"]),
    "llama3": (["", "Hi {", "a < b", "{0}"], ["{2}", "{"]),
    "qwen3-coder": (["Hi {", "a < b", "Hi\n{0}", "{0}{1}"], ["{2}", "Hi {3}", "<function=other>"]),
    "harmony": (
        [
            "{0}",
            "{1}",
            "<|channel|>final<|message|>Hi {",
            "<|channel|>commentary<|message|>I read.<|end|><|start|>assistant{0}",
        ],
        ["Hi", "<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{}"],
    ),
}
"""Texts that may have calls: 0 and 1 are the accepted ones of `CASES`, others its refused."""


@pytest.mark.parametrize("name", TEXTS)
def test_strict_calls_in_a_text_satisfy_their_schemas(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, special=HARMONY if name == "harmony" else ())
    replies, consumed = admitted(tokenizer, name, TOOLS, must_call=False)
    calls = [*CASES[name][0][:2], *CASES[name][1][1:]]
    if name == "llama3":
        calls = [CASES[name][0][0], "", CASES[name][1][1]]
    for place, texts in enumerate(TEXTS[name]):
        for text in texts:
            for number, call in enumerate(calls):
                text = text.replace(f"{{{number}}}", call)
            assert consumed(text) == (place == 0), text


@pytest.mark.parametrize("name", CASES)
def test_calls_or_a_constrained_text_are_admitted_and_nothing_else(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, special=HARMONY if name == "harmony" else ())
    text = Structured.json_schema({"enum": ["yes", {"a": 1}]})
    _, consumed = admitted(tokenizer, name, TOOLS, must_call=False, text=text)
    calls, others = CASES[name]
    final = "<|channel|>final<|message|>{}" if name == "harmony" else "{}"
    for reply in (*calls, final.format('"yes"'), final.format('{"a": 1}')):
        assert consumed(reply), reply
    for reply in (*others, final.format('"no"'), final.format('"yes"') + calls[0]):
        assert not consumed(reply), reply


def test_formats_without_a_grammar_force_nothing(tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    without = {one.name for one in FORMATS if one.grammars is None}
    assert without == {"gemma4", "think"}
    for name in (*without, "none"):
        for must_call in (True, False):
            replies = Replies(tokenizer, name)
            assert replies.calls(TOOLS, is_parallel=True, must_call=must_call) is None


def test_a_format_beside_calls_that_cannot_be_constrained_is_refused_by_name(tmp_path):
    replies = Replies(make_tokenizer(tmp_path, TEMPLATE), "gemma4")
    fields = ToolFields.read({"tools": TOOLS}, Reading(Limits()))
    field = "response_format.json_schema.schema"
    with pytest.raises(ServiceError, match="excludes tools") as caught:
        fields.constraint(SimpleNamespace(replies=replies), TOOLS, field, Structured.json_object())
    assert caught.value.field == field
    text = Structured.json_object()
    assert fields.constraint(SimpleNamespace(replies=replies), [], field, text) == (field, text)


@pytest.fixture
def client(tools_client):
    return tools_client


def modes(name: str) -> dict:
    """A tool whose schema allows short calls only."""
    properties = {"mode": {"enum": ["r", "w"]}}
    parameters = dict(PARAMETERS, properties=properties, required=["mode"])
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CHAT = dict(model="tiny", seed=1, max_tokens=400, messages=[{"role": "user", "content": "a"}])
CHAT["tools"] = [modes("open"), modes("close")]


@pytest.mark.sampled(2, slow=1)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_random_model_calls_the_tool_that_it_must_call(client, temperature, is_stream):
    named = {"type": "function", "function": {"name": "close"}}
    options = CHAT | dict(temperature=temperature, stream=is_stream, tool_choice=named)
    answer = client.chat.completions.create(**options)
    if is_stream:
        chunks = [choice for chunk in answer for choice in chunk.choices]
        calls = [call for choice in chunks for call in choice.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert not answer.choices[0].message.content
    (call,) = calls
    assert (call.function.name, reason) == ("close", "tool_calls")
    assert json.loads(call.function.arguments)["mode"] in ("r", "w")


@pytest.mark.parametrize(
    "options",
    [
        dict(tool_choice="required", tools=[]),
        dict(tool_choice={"type": "function", "function": {"name": "other"}}),
        dict(tool_choice="always"),
    ],
)
def test_choices_that_cannot_be_are_refused(client, options):
    with pytest.raises(openai.BadRequestError, match="tool_choice: "):
        client.chat.completions.create(**CHAT | options)


@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
def test_strict_functions_are_taken_by_every_route(client, route):
    """The model is random, so its text may have no call; if it has one, its arguments are right."""
    function = modes("open")["function"]
    if route == "responses":
        tool = {"type": "function", "strict": True, **function}
        options = dict(model="tiny", max_output_tokens=40, temperature=1)
        answer = client.responses.create(input="a", tools=[tool], **options)
        assert answer.status in ("completed", "incomplete")
    elif route == "messages":
        schema = {"name": "open", "input_schema": function["parameters"], "strict": True}
        content = dict(model="tiny", max_tokens=40, tools=[schema], messages=CHAT["messages"])
        assert httpx.post(f"{client.base_url}messages", json=content).json()["type"] == "message"
    else:
        tools = [{"type": "function", "function": function | {"strict": True}}, modes("close")]
        choice = client.chat.completions.create(**CHAT | dict(tools=tools)).choices[0]
        for call in choice.message.tool_calls or ():
            json.loads(call.function.arguments)


def go(form: str, **values: str) -> str:
    """A call of `go`; values are JSON, and text where the format has no JSON."""
    if form == "qwen3-coder":
        return of_coder("go", *((key, value.strip('"')) for key, value in values.items()))
    key = "parameters" if form == "llama3" else "arguments"
    arguments = ", ".join(f'"{name}": {value}' for name, value in values.items())
    call = f'{{"name": "go", "{key}": {{{arguments}}}}}'
    return call if form == "llama3" else of_qwen(call)


SHARED = {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}


@pytest.mark.parametrize("name", ["$defs", "definitions"])
@pytest.mark.parametrize("form", [one for one in FORMATS if one.grammars], ids=lambda one: one.name)
def test_references_of_a_tools_schema_are_found_within_a_call(form, name, tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    at = {"$ref": f"#/{name}/Point"}
    schema = {"type": "object", "properties": {"at": at}, "required": ["at"], name: SHARED}
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    _, consumed = admitted(tokenizer, form.name, tools, must_call=True)
    assert consumed(go(form.name, at='{"x": 5}'))
    assert not consumed(go(form.name, at='{"x": "a"}'))


@pytest.mark.parametrize("form", [one for one in FORMATS if one.grammars], ids=lambda one: one.name)
@pytest.mark.parametrize("w", ["w", "default"])  # the other is a keyword of schemas, too
def test_references_to_parts_of_a_tools_schema_point_into_the_call(form, w, tmp_path):
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    parts = {"v": {"type": "integer"}, w: {"$ref": "#/properties/v"}, "next": {"$ref": "#"}}
    schema = {"properties": parts, "required": [w, "next"], "additionalProperties": False}
    schema["type"] = "object"
    schema["properties"]["next"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    _, consumed = admitted(tokenizer, form.name, tools, must_call=True)
    whole = lambda value, rest: go(form.name, **{w: value, "next": rest})
    assert consumed(whole("5", f'{{"{w}": 6, "next": null}}'))
    assert not consumed(whole('"a"', "null"))
    assert not consumed(whole("5", '{"name": "go"}'))


@pytest.mark.parametrize("form", [one for one in FORMATS if one.grammars], ids=lambda one: one.name)
def test_a_function_without_a_schema_takes_any_arguments(form, tmp_path):
    """Such are functions that are not strict, beside one that is."""
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    tools = [{"type": "function", "function": {"name": "go"}}]
    _, consumed = admitted(tokenizer, form.name, tools, must_call=True)
    assert consumed(go(form.name, at='"Rome"'))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": ["string", "null"]}, "b": {"type": ["integer", "null"]}}},
        {"properties": {"a": {"type": {}}}},
        {"properties": {"a": True}, "required": 5},
        {"properties": {"a": {}}, "required": ["a", "a", ["a"], None]},
        {"properties": 5, "required": ["a"]},
        {"type": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", [one for one in FORMATS if one.grammars], ids=lambda one: one.name)
def test_any_schema_of_a_tool_has_a_grammar(form, schema, tmp_path):
    """A grammar that is wrong is refused later, by the check of constraints."""
    tool = {"type": "function", "function": {"name": "edit", "parameters": schema}}
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    for grammar in (form.grammars.must, form.grammars.may):
        assert "edit" in grammar(tokenizer, [tool], True)


def test_the_embedded_model_takes_tools():
    tokenizer = Tokenizer(embedded("target"))
    name = reply_format_of(Settings(), tokenizer)
    assert Replies(tokenizer, name).calls(TOOLS, is_parallel=True, must_call=True)
    text = tokenizer.chat_text([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])
    assert text == "a\nb"
    assert reply_format_of(Settings(reply_format="none"), tokenizer) == "none"
    assert reply_format_of(Settings(), None) == "auto"


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
