"""Replies in harmony's channels: by tokens, and through a live server."""

import pytest

from peagle_jax.text.tokenizer import Tokenizer
from serving.harmony import HarmonyIds, HarmonyParser
from serving.replies.arguments import Tools
from serving.replies.parser import Replies, Reply
from serving.replies.parts import ReplyPart, ToolCall
from tests.serving.live import LiveServer
from tests.serving.scripted import Script, make_engine, make_tokenizer

SPECIAL = ("start", "channel", "message", "end", "return", "call", "constrain")
ANALYSIS = "<|channel|>analysis<|message|>They greet é.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hi é!<|return|>"
TOOL = (
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


@pytest.fixture(scope="session")
def harmony(tmp_path_factory) -> Tokenizer:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "<|start|>assistant"
    )
    special = [f"<|{name}|>" for name in SPECIAL]
    return make_tokenizer(tmp_path_factory.mktemp("harmony"), template, special=special)


def parsed(tokenizer: Tokenizer, text: str, *, size: int = 1, stops=(), tools=None) -> ReplyPart:
    """A whole reply, parsed `size` tokens at a time."""
    parser = HarmonyParser(tokenizer, stops, HarmonyIds.of(tokenizer), tools)
    tokens, reply = tokenizer.encode(text), ReplyPart()
    for start in range(0, len(tokens), size):
        reply += parser.add(tokens[start : start + size])
    return reply + parser.finish()


CUT = ANALYSIS + "<|start|>assistant"
TO_F = CUT + " to=functions.f<|channel|>commentary<|message|>{}<|call|>"
THEY, BOTH = "They greet é.", ("Hi é!", "They greet é.")
SAID = {
    ANALYSIS + FINAL: BOTH,
    FINAL.removeprefix("<|start|>assistant"): ("Hi é!", ""),
    "<|message|>Hi": ("Hi", ""),
    "just text": ("just text", ""),  # the prompt has the header
    "just text<|end|>" + FINAL: ("just textHi é!", ""),
    ANALYSIS + TOOL: ("", THEY + "{}"),
    TO_F: ("", THEY + "{}"),
    CUT + "<|channel|>commentary<|message|>I look<|end|>" + FINAL: ("I lookHi é!", THEY),
    CUT + "<|channel|>fi": ("", THEY),  # cut off
    ANALYSIS[:-10]: ("", "They greet"),
    CUT + "<|end|>" + FINAL: BOTH,
    "<|channel|>analysisword<|message|>no such channel": ("no such channel", ""),
}
"""A reply -> its text and its reasoning."""


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_text_and_reasoning_are_separated(harmony, size):
    for reply, (text, reasoning) in SAID.items():
        assert parsed(harmony, reply, size=size) == ReplyPart(text, reasoning), reply


CALL = ToolCall("f", "{}")
CALLED = {
    ANALYSIS + TOOL: ("", [CALL]),
    TO_F: ("", [CALL]),
    TOOL + TOOL.replace("{}", '{"a": "é<|x"}'): ("", [CALL, ToolCall("f", '{"a": "é<|x"}')]),
    TOOL.replace("{}", '{"n": "3"}'): ("", [ToolCall("f", '{"n": 3}')]),
    TOOL.replace("{}", "{'a'}") + FINAL: ("{'a'}Hi é!", []),
    TOOL.removesuffix("<|call|>"): ("{}", []),  # cut off
    TOOL.replace("functions.f", "browser.open"): ("", []),
    TOOL.removesuffix("<|call|>") + FINAL: ("Hi é!", [CALL]),
}
"""A reply -> its text and its calls."""


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_messages_to_functions_are_calls(harmony, size):
    properties = {"n": {"type": "integer"}}
    tools = Tools([{"function": {"name": "f", "parameters": {"properties": properties}}}])
    for reply, (text, calls) in CALLED.items():
        whole = parsed(harmony, reply, size=size, tools=tools)
        assert (whole.text, whole.calls) == (text, tuple(calls)), reply


def test_pieces_come_as_soon_as_they_are_certain(harmony):
    parser = HarmonyParser(harmony, (), HarmonyIds.of(harmony))
    parts = [parser.add([token]) for token in harmony.encode(ANALYSIS + FINAL)]
    pieces = [part for part in parts if part != ReplyPart()]
    assert len(pieces) == len("They greet é.Hi é!")
    assert pieces[0] == ReplyPart(reasoning="T")
    assert pieces[-1] == ReplyPart("!")


def test_stop_strings_end_text_and_reasoning(harmony):
    assert parsed(harmony, FINAL, stops=("i é",)) == ReplyPart("H")
    assert parsed(harmony, ANALYSIS[:-10], stops=("gre",)) == ReplyPart("", "They ")
    # The end of a message emits text that is only the beginning of a stop string.
    assert parsed(harmony, ANALYSIS + FINAL, stops=(".x",)) == ReplyPart("Hi é!", "They greet é.")


def test_without_harmony_all_output_is_text(tokenizer, harmony):
    assert HarmonyIds.of(tokenizer) is None
    assert HarmonyIds.of(None) is None
    assert Replies(None).parsers(Reply([1], True))() is None
    assert Replies(harmony).name == Replies(harmony, "harmony").name == "harmony"
    assert tokenizer.special_id("a") is None
    assert harmony.name_of(harmony.special_id("<|end|>")) == "<|end|>"
    assert harmony.name_of(harmony.encode("é")[0]) == "\ufffd"
    plain = Replies(harmony).parsers(Reply([1], False))()
    reply = plain.add(harmony.encode(ANALYSIS)) + plain.finish()
    assert reply == ReplyPart("analysisThey greet é.")


@pytest.fixture(scope="module")
def scripted(harmony):
    """A live server whose model emits `ANALYSIS + FINAL`."""
    engine = make_engine(harmony, "<|return|>")
    Script(engine, harmony.encode(ANALYSIS + FINAL))
    with LiveServer(engine, http=True) as server:
        yield server


def test_chats_over_http_have_reasoning(scripted):
    with scripted.openai() as client:
        chat = dict(model="tiny", temperature=0, messages=[{"role": "user", "content": "Hello"}])
        message = client.chat.completions.create(**chat).choices[0].message
        assert (message.content, message.reasoning_content) == ("Hi é!", "They greet é.")
        # Clients send a received answer back unchanged.
        again = chat | dict(messages=[*chat["messages"], message.model_dump(), *chat["messages"]])
        assert client.chat.completions.create(**again).choices[0].message.content == "Hi é!"
        deltas = [
            chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **chat)
        ]
        assert (
            "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "They greet é."
        )
        assert "".join(delta.content or "" for delta in deltas) == "Hi é!"
        cut = client.chat.completions.create(max_tokens=15, **chat).choices[0]
        assert cut.message.content == ""
        assert "They greet é.".startswith(cut.message.reasoning_content)
        plain = client.completions.create(
            model="tiny", temperature=0, prompt="Hello", max_tokens=100
        )
        assert plain.choices[0].text == "analysisThey greet é.assistantfinalHi é!"
