"""Parsers of replies: every split of a reply gives one result, and no text is lost."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as TEMPLATES
from transformers.utils.chat_parsing import ResponseParser

from peagle_jax.options import options_of
from serving.replies.arguments import Tools
from serving.replies.formats import FORMATS, NAMES, detected
from serving.replies.lexer import Lexer
from serving.replies.marked import MarkedText
from serving.replies.parser import Replies, Reply
from serving.replies.parts import ReplyPart, ToolCall
from serving.settings import Settings
from tests.serving.scripted import make_tokenizer

BY_NAME = {one.name: one for one in FORMATS}
PROPERTIES = {
    "path": {"type": "string"},
    "lines": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "all": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "ranges": {"type": "array"},
    "at": {"$ref": "#/$defs/Point"},
    "circle": {"$ref": "#/properties/circle"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Point": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
TOOLS = Tools([TOOL])


def joined(parser, pieces) -> ReplyPart:
    return ReplyPart.joined([*map(parser.add, pieces), parser.finish()])


def parse(form: str, pieces, *, tools=TOOLS, **options) -> ReplyPart:
    return joined(MarkedText(BY_NAME[form], tools=tools, **options), pieces)


def hermes(name, arguments, ends="\n") -> str:
    call = json.dumps(dict(name=name, arguments=arguments), ensure_ascii=False)
    return f"<tool_call>{ends}{call}{ends}</tool_call>"


def coder(name, **arguments) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def call(name="read", **arguments) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


CODE = '\n  if a < b:\n    return "}</tool_call>"  # é\n</parameter> and </function>\n'


def case(form: str, reply: str, *calls: ToolCall, text: str = "", reasoning: str = "") -> tuple:
    return form, reply, ReplyPart(text, reasoning, calls)


CASES = {
    "reasoning": case("qwen3", "<think>\nHm \n\n</think>\n\nHi\n", text="Hi\n", reasoning="Hm"),
    "reasoning, cut off": case("qwen3", "<think>\nHm \n", reasoning="Hm"),
    "no reasoning": case("qwen3", "<think>\n\n</think>\n\n"),
    "no end": case("qwen3", hermes("read", {}).removesuffix("</tool_call>"), call()),
    "reasoning and two calls": case(
        "qwen3",
        f"<think>a</think>Look:\n\n{hermes('read', dict(path='a'))}\n{hermes('other', {})}\n",
        call(path="a"),
        call("other"),
        text="Look:",
        reasoning="a",
    ),
    "markers in strings": case(
        "qwen3", hermes("read", {"path": '</tool_call>"{\\'}), call(path='</tool_call>"{\\')
    ),
    "types": case(
        "qwen3",
        hermes("read", dict(lines="3", share="null", path="3", all="True", x="5")),
        call(lines=3, share=None, path="3", all=True, x="5"),
    ),
    "numbers of Python alone": case(
        "qwen3",
        hermes("read", dict(lines="1_000", share="١.5")),
        call(lines="1_000", share="١.5"),
    ),
    "two objects in one call": case(
        "qwen3", '<tool_call>{"name":"a"}\n{"name":"b"}</tool_call>', call("a"), call("b")
    ),
    "arguments as text": case("qwen3", hermes("read", '{"lines": 1}'), call(lines=1)),
    "a brace is missing": case(
        "qwen3",
        f'<tool_call>{{"name": "f"</tool_call> {hermes("read", {})}',
        call(),
        text='<tool_call>{"name": "f"</tool_call>',
    ),
    "prose about calls": case(
        "qwen3", "Use <tool_call> tags." + hermes("read", {}), call(), text="Use <tool_call> tags."
    ),
    "half of a pair": case(
        "qwen3", '<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}</tool_call>', call("f", a="?")
    ),
    "coder": case(
        "qwen3-coder",
        "Ok\n" + coder("read", path=" a ", lines=" 3", all="false"),
        call(path=" a ", lines=3, all=False),
        text="Ok",
    ),
    "coder, code": case("qwen3-coder", coder("write", text=CODE), call("write", text=CODE)),
    "coder, two calls": case(
        "qwen3-coder", coder("a") + "\n" + coder("b", x=""), call("a"), call("b", x="")
    ),
    "coder, bare": case(
        "qwen3-coder",
        "Ok <function=a>\n<parameter=x>1</parameter></function> x",
        call("a", x="1"),
        text="Ok x",
    ),
    "coder, start forgotten": case(
        "qwen3-coder", coder("a").removeprefix("<tool_call>\n"), call("a")
    ),
    "coder, end forgotten": case(
        "qwen3-coder", coder("a").removesuffix("</tool_call>") + coder("b"), call("a"), call("b")
    ),
    "coder, types": case(
        "qwen3-coder",
        coder("read", ranges="[1]", at='{"x": 1}', share="1e999", circle="1"),
        call(ranges=[1], at={"x": 1}, share="1e999", circle="1"),
    ),
    "llama": case("llama3", '{"name": "read", "parameters": {"lines": "2"}}', call(lines=2)),
    "llama, two": case(
        "llama3",
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        call("a"),
        call("b"),
    ),
    "gemma": case(
        "gemma4",
        '<|channel>thought\nHm\n<channel|>Ok<|tool_call>call:read{path:<|"|>{a:"b",<tool_call|><|"|>,ranges:[1,{x:true}]}<tool_call|>',
        call(path='{a:"b",<tool_call|>', ranges=[1, {"x": True}]),
        text="Ok",
        reasoning="Hm",
    ),
    "gemma, two": case(
        "gemma4",
        "<|tool_call>call:a{}<tool_call|><|tool_call>call:b{x:1}<tool_call|>",
        call("a"),
        call("b", x=1),
    ),
    "thoughts": case("think", "<think>a</think>\nb", text="b", reasoning="a"),
}
KEPT = {
    "text": ("qwen3", " Hi <b>é</b> {1}\n"),
    "marker in text": ("qwen3", "Hi <think> there</think>"),
    "cut off by length": ("qwen3", "a \n" + hermes("read", {})[:-14]),
    "no JSON": ("qwen3", "\n<tool_call>\n{'name'}\n</tool_call>\nx"),
    "no object": ("qwen3", hermes("read", [1])),
    "NaN": ("qwen3", '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>'),
    "coder, cut off": ("qwen3-coder", coder("a", x="1")[:-20]),
    "llama, JSON": ("llama3", '{"name": "Bob"} x'),
    "llama, code": ("llama3", "<|python_tag|>print(1)"),
    "gemma, cut off": ("gemma4", '<|tool_call>call:a{x:<|"|>1'),
}
"""Replies that stay text as they are."""
CASES |= {name: case(form, reply, text=reply) for name, (form, reply) in KEPT.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_split_of_a_reply_gives_its_text_reasoning_and_calls(name, num_cases):
    form, reply, expected = CASES[name]
    whole = parse(form, [reply])
    assert whole == expected
    check = lambda part: part == expected and part.items == whole.items
    assert check(parse(form, list(reply)))
    for cut in range(len(reply)):
        assert check(parse(form, [reply[:cut], reply[cut:]]))
    rng = random.Random(name)
    for _ in range(num_cases("splits of replies", 20)):
        cuts = sorted(rng.choices(range(len(reply) + 1), k=rng.randint(1, 8)))
        pieces = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert check(parse(form, pieces))


def test_parts_keep_their_order():
    reply = f"<think>Hm</think>One {hermes('a', {})} two {hermes('b', {})}"
    calls = [("call", call(name)) for name in "ab"]
    said = [("reasoning", "Hm"), ("text", "One"), calls[0], ("text", " two"), calls[1]]
    assert [*parse("qwen3", [reply]).items] == said


@pytest.mark.parametrize("form", [one.name for one in FORMATS])
def test_random_markers_are_one_result_in_every_split_and_no_text_is_lost(form, num_cases):
    markers = sorted(BY_NAME[form].all_markers)
    words = st.sampled_from(
        [*markers, *(one[:-1] for one in markers), " ", "\n", "a", "f>", ":1", ","]
    )

    @settings(
        max_examples=num_cases("replies of random markers", 150), deadline=None, database=None
    )
    @given(st.lists(words, max_size=30), st.booleans())
    def check(words, with_tools):
        reply, tools = "".join(words), TOOLS if with_tools else None
        whole = parse(form, [reply], tools=tools)
        for pieces in (words, list(reply)):
            part = parse(form, pieces, tools=tools)
            assert (part, part.items) == (whole, whole.items)
        letters = lambda text: sorted(text.replace(" ", "").replace("\n", ""))
        if not whole.calls and (BY_NAME[form].reasoning or ("\0",))[0] not in reply:
            assert letters(whole.text) == letters(reply)
        if not with_tools:
            assert not whole.calls

    check()


FLOODS = [
    (form, flood)
    for form, floods in {
        "qwen3": ("<tool_call>", '<tool_call>{"name":"\\', " ", "\n<", "<think>"),
        "qwen3-coder": ("<function=", "<function=f><parameter=x></parameter> ", "<tool_call> "),
        "llama3": ("{", '{"a":', "; "),
        "gemma4": ("<|tool_call>call:", '<|"|>', '<|tool_call>call:f{x:<|"|>'),
    }.items()
    for flood in floods
]


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize(("form", "flood"), FLOODS)
def test_a_hostile_reply_of_a_megabyte_takes_linear_time(form, flood):
    """Four times the text takes about four times as long; quadratic time would be sixteen times."""

    def seconds(size: int) -> float:
        text = flood * (size // len(flood))
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        begin = time.process_time()
        parse(form, pieces)
        return time.process_time() - begin

    assert seconds(1 << 20) < 9 * seconds(1 << 18) + 0.5


def test_the_prompt_may_begin_the_reasoning():
    assert parse("qwen3", ["\nHm\n</think>\nHi"], is_reasoning=True) == ReplyPart("Hi", "Hm")
    assert parse("qwen3", ["Hm"], is_reasoning=True) == ReplyPart("", "Hm")


def test_text_comes_as_soon_as_it_is_certain():
    parser = MarkedText(BY_NAME["qwen3"], tools=TOOLS)
    assert parser.add("Hello <b").text == "Hello <b"
    assert parser.add(" <tool").text == ""
    assert parser.add("s>").text == " <tools>"


@pytest.mark.parametrize(
    ("family", "form", "case"),
    [
        ("qwen3", "qwen3", "reasoning and two calls"),
        ("qwen3_5_moe", "qwen3-coder", "coder, two calls"),
        ("gemma4", "gemma4", "gemma, two"),
    ],
)
def test_transformers_own_templates_agree(family, form, case):
    template = next(one for names, one in TEMPLATES.items() if family in names)
    _, reply, expected = CASES[case]
    parser = ResponseParser(template, prefix="")
    parser.feed(reply)
    fields, _ = parser.finalize()
    found = [one["function"] for one in fields["tool_calls"]]
    calls = tuple(TOOLS.call(one["name"], one["arguments"]) for one in found)
    assert calls == expected.calls == parse(form, [reply]).calls


@given(
    st.lists(st.text("ab<|", max_size=6), max_size=8),
    st.sets(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None, database=None)
def test_the_lexer_finds_the_same_markers_in_every_split(pieces, markers):
    begins = lambda one: any(one != other and other.startswith(one) for other in markers)
    markers = [one for one in markers if not begins(one)]
    pieces_of = lambda split: [piece for part in split for piece in part]

    def found(texts):
        lexer = Lexer(markers)
        flat = [*pieces_of([lexer.add(text) for text in texts]), *lexer.finish()]
        merged = []
        for piece in flat:
            is_marker = piece in markers
            if merged and not is_marker and merged[-1][1] is False:
                merged[-1] = (merged[-1][0] + piece, False)
            else:
                merged.append((piece, is_marker))
        return merged

    text = "".join(pieces)
    assert "".join(piece for piece, _ in found(pieces)) == text
    assert found(pieces) == found([text]) == found(list(text))


QWEN = "{%- if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_chat_template_or_the_operator_chooses_the_format(tmp_path, tokenizer):
    assert detected(QWEN).name == "qwen3"
    assert detected(QWEN + "<function=").name == "qwen3-coder"
    assert detected("{{ messages }}") is None
    own = make_tokenizer(tmp_path / "own", QWEN, special=["<|end|>"])
    for chosen, name, has_calls, has_reasoning in (
        (Replies(own), "qwen3", True, True),
        (Replies(own, "none"), "none", False, False),
        (Replies(own, "llama3"), "llama3", True, False),
        (Replies(own, "think"), "think", False, True),
        (Replies(tokenizer), "none", False, False),
        (Replies(None), "none", False, False),
    ):
        found = chosen.name, chosen.has_calls, chosen.has_reasoning
        assert found == (name, has_calls, has_reasoning)
    with pytest.raises(ValueError, match="no harmony tokens"):
        Replies(own, "harmony")


def test_special_tokens_that_frame_calls_reach_the_parser_and_others_do_not(tmp_path):
    special = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<pad>"]
    own = make_tokenizer(tmp_path, "<|tool_call><|channel>", special=special)
    reply = (
        "<|channel>thought\nHm<channel|><pad>Hi"
        + '<|tool_call>call:a{x:<|"|>é<|"|>}<tool_call|><|im_end|>'
    )
    tokens = own.encode(reply)
    new_parser = Replies(own).parsers(Reply([1], True, [TOOL]))
    for size in (1, 3, 1000):
        parser = new_parser()
        parts = [parser.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        parsed = ReplyPart.joined([*parts, parser.finish()])
        assert parsed == ReplyPart("Hi", "Hm", (call("a", x="é"),))
    plain = Replies(own).parsers(Reply([1], False))()
    assert plain.add(tokens).text == "thought\nHmHicall:a{x:é}"


def test_the_option_has_the_name_of_every_format():
    choices = options_of(Settings)["reply_format"].choices
    assert sorted(choices) == sorted(("auto", *NAMES))
