"""Replies in harmony's channels: reasoning and text are separated, by tokens and through a live server."""

import grpc
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from peagle_jax import Engine
from peagle_jax.text import Tokenizer
from serving.harmony import HarmonyIds, HarmonyParser, ReplyPart, parser_factory
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer

SPECIAL = ("start", "channel", "message", "end", "return", "call", "constrain")
ANALYSIS = "<|channel|>analysis<|message|>They greet é.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hi é!<|return|>"
TOOL = (
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


@pytest.fixture(scope="session")
def harmony(tmp_path_factory) -> Tokenizer:
    """Bytes, a few words and harmony's special tokens: 256 + 3 + 7 of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"fi": ("f", "i"), "al": ("a", "l"), "an": ("a", "n")}
    vocab = {token: i for i, token in enumerate([*letters, *words])}
    backend = Backend(models.BPE(vocab, list(words.values())))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    folder = tmp_path_factory.mktemp("harmony")
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    template += "<|start|>assistant"
    (folder / "tokenizer_config.json").write_text(f'{{"chat_template": "{template}"}}')
    return Tokenizer(folder)


def parsed(tokenizer: Tokenizer, text: str, *, size: int = 1, stops=()) -> ReplyPart:
    """A whole reply, parsed `size` tokens at a time."""
    parser = HarmonyParser(tokenizer, stops, HarmonyIds.of(tokenizer))
    tokens, reply = tokenizer.encode(text), ReplyPart()
    for start in range(0, len(tokens), size):
        reply += parser.add(tokens[start : start + size])
    return reply + parser.finish()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("reply", "text", "reasoning"),
    [
        (ANALYSIS + FINAL, "Hi é!", "They greet é."),
        (FINAL.removeprefix("<|start|>assistant"), "Hi é!", ""),
        ("<|message|>Hi", "Hi", ""),
        ("just text", "just text", ""),  # the prompt has the header
        ("just text<|end|>" + FINAL, "just textHi é!", ""),
        (ANALYSIS + TOOL, "", "They greet é.{}"),
        (ANALYSIS + "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
         "", "They greet é.{}"),
        (ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I look<|end|>" + FINAL,
         "I lookHi é!", "They greet é."),
        (ANALYSIS + "<|start|>assistant<|channel|>fi", "", "They greet é."),  # cut off
        (ANALYSIS[:-10], "", "They greet"),
        (ANALYSIS + "<|start|>assistant<|end|>" + FINAL, "Hi é!", "They greet é."),
        ("<|channel|>analysisword<|message|>no such channel", "no such channel", ""),
    ],
)  # fmt: skip
def test_text_and_reasoning_are_separated(harmony, reply, text, reasoning, size):
    assert parsed(harmony, reply, size=size) == ReplyPart(text, reasoning)


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
    assert parser_factory(None, None, ())() is None
    assert tokenizer.special_id("a") is None
    assert harmony.name_of(harmony.special_id("<|end|>")) == "<|end|>"
    assert harmony.name_of(harmony.encode("é")[0]) == "\ufffd"
    plain = parser_factory(harmony, None, ())()
    reply = plain.add(harmony.encode(ANALYSIS)) + plain.finish()
    assert reply == ReplyPart("analysisThey greet é.")


class Script:
    """Makes an engine emit the tokens of one reply to every request."""

    def __init__(self, engine: Engine, reply: list[int]):
        self._engine, self._reply = engine, reply
        self._original = engine.scheduler._receive
        engine.scheduler._receive = self._receive

    def _receive(self, request, row, tokens, count, logprobs):
        start = len(request.output)
        tokens = tokens.copy()
        tokens[row, :count] = self._reply[start : start + count]
        return self._original(request, row, tokens, count, logprobs)


@pytest.fixture(scope="module")
def scripted(make_engine, harmony):
    """A live server whose model emits `ANALYSIS + FINAL`."""
    from peagle_jax import EngineConfig
    from tests import tiny
    from tests.serving.conftest import SIZES

    return_id = harmony.special_id("<|return|>")
    target = tiny.target(vocab_size=harmony.vocab_size, eos_ids=(return_id,))
    config = EngineConfig(**(SIZES | dict(max_model_len=192)))
    engine = Engine(target, None, config, tokenizer=harmony)
    Script(engine, harmony.encode(ANALYSIS + FINAL))
    server = LiveServer(engine, http=True)
    yield server
    server.close()


def test_chats_over_grpc_have_reasoning(scripted):
    with grpc.insecure_channel(scripted.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])
        once = stub.GenerateOnce(pb.GenerateRequest(chat=chat))
        assert once.sequences[0].text == "Hi é!"
        assert once.sequences[0].reasoning == "They greet é."
        assert once.sequences[0].finish.reason == pb.FINISH_REASON_STOP
        deltas = list(stub.Generate(pb.GenerateRequest(chat=chat)))
        assert "".join(delta.text for delta in deltas) == "Hi é!"
        assert "".join(delta.reasoning for delta in deltas) == "They greet é."
        plain = stub.GenerateOnce(pb.GenerateRequest(text="Hello"))
        assert plain.sequences[0].text == "analysisThey greet é.assistantfinalHi é!"
        assert plain.sequences[0].reasoning == ""


def test_chats_over_http_have_reasoning(scripted):
    with openai.OpenAI(base_url=f"http://{scripted.http_address}/v1", api_key="x") as client:
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
