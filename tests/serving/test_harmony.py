"""Replies in channels: reasoning and text told apart, by tokens and through a live server."""

import grpc
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from peagle_jax import Engine
from peagle_jax.text import Tokenizer
from serving.harmony import Channels, HarmonySpeech, Spoken, listener
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer

MARKS = ("start", "channel", "message", "end", "return", "call", "constrain")
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
    backend.add_special_tokens([AddedToken(f"<|{mark}|>", special=True) for mark in MARKS])
    folder = tmp_path_factory.mktemp("harmony")
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    template += "<|start|>assistant"
    (folder / "tokenizer_config.json").write_text(f'{{"chat_template": "{template}"}}')
    return Tokenizer(folder)


def spoken(tokenizer: Tokenizer, text: str, *, size: int = 1, stops=()) -> Spoken:
    """What a reply says when `size` tokens come at once."""
    speech = HarmonySpeech(tokenizer, stops, Channels.of(tokenizer))
    tokens, said = tokenizer.encode(text), Spoken()
    for start in range(0, len(tokens), size):
        said += speech.add(tokens[start : start + size])
    return said + speech.finish()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("reply", "text", "reasoning"),
    [
        (ANALYSIS + FINAL, "Hi é!", "They greet é."),
        (FINAL.removeprefix("<|start|>assistant"), "Hi é!", ""),
        ("<|message|>Hi", "Hi", ""),
        ("just text", "just text", ""),  # the prompt began the message
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
def test_messages_are_told_apart(harmony, reply, text, reasoning, size):
    assert spoken(harmony, reply, size=size) == Spoken(text, reasoning)


def test_pieces_come_as_soon_as_they_are_certain(harmony):
    speech = HarmonySpeech(harmony, (), Channels.of(harmony))
    said = [speech.add([token]) for token in harmony.encode(ANALYSIS + FINAL)]
    pieces = [one for one in said if one != Spoken()]
    assert len(pieces) == len("They greet é.Hi é!")
    assert pieces[0] == Spoken(reasoning="T")
    assert pieces[-1] == Spoken("!")


def test_stop_strings_end_text_and_reasoning(harmony):
    assert spoken(harmony, FINAL, stops=("i é",)) == Spoken("H")
    assert spoken(harmony, ANALYSIS[:-10], stops=("gre",)) == Spoken("", "They ")
    # What only begins like one comes out at the end of its message.
    assert spoken(harmony, ANALYSIS + FINAL, stops=(".x",)) == Spoken("Hi é!", "They greet é.")


def test_other_tokenizers_speak_plainly(tokenizer, harmony):
    assert Channels.of(tokenizer) is None
    assert Channels.of(None) is None
    assert listener(None, None, ())() is None
    assert tokenizer.special_id("a") is None
    assert harmony.name_of(harmony.special_id("<|end|>")) == "<|end|>"
    assert harmony.name_of(harmony.encode("é")[0]) == "\ufffd"
    plain = listener(harmony, None, ())()
    said = plain.add(harmony.encode(ANALYSIS)) + plain.finish()
    assert said == Spoken("analysisThey greet é.")


class Script:
    """An engine that says the tokens of a reply, whatever it is asked."""

    def __init__(self, engine: Engine, reply: list[int]):
        self._engine, self._reply = engine, reply
        self._take_in = engine.scheduler._receive
        engine.scheduler._receive = self._receive

    def _receive(self, request, row, tokens, count, logprobs):
        said = len(request.output)
        tokens = tokens.copy()
        tokens[row, :count] = self._reply[said : said + count]
        return self._take_in(request, row, tokens, count, logprobs)


@pytest.fixture(scope="module")
def scripted(make_engine, harmony):
    """A live server whose model says `ANALYSIS + FINAL`."""
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
        # An answer may be sent back as it came.
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
