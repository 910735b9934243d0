"""Chat templates of each family: golden token ids, and transformers' own AutoTokenizer.

Goldens spell plain bytes as bytes: in these vocabularies (families.py) they are their own ids.
"""

import json
import socket
from datetime import datetime
from types import SimpleNamespace

import pytest

from peagle_jax.cli.model_folders import embedded
from peagle_jax.config import ConfigError
from peagle_jax.text import chat_templates, text_process
from peagle_jax.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, write

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi €"}
REPLY = {"role": "assistant", "content": "Yo 👋"}
AGAIN = {"role": "user", "content": "ok 12345"}
TALK = [SYSTEM, USER, REPLY, AGAIN]
DATE = "2026-01-31"

USER_ID, ASSISTANT_ID, SYSTEM_ID = 258, 266, 271  # bytes take 0..255, then us, use, user, as, ...
HI = b"Hi \xe2\x82\xac"
YO = b"Yo \xf0\x9f\x91\x8b"

AS, CHANNEL, START, END, MESSAGE = 259, 279, 280, 281, 282
GPT_OSS = [
    *(START, SYSTEM_ID, MESSAGE, *b"Date: 2026-01-31\nRe", AS, *b"oning: medium", END),
    *(START, *b"developer", MESSAGE, *b"# Instructions\n\nBe brief.", END),
    *(START, USER_ID, MESSAGE, *HI, END),
    *(START, ASSISTANT_ID, CHANNEL, *b"final", MESSAGE, *YO, END),
    *(START, USER_ID, MESSAGE, *b"ok 12345", END),
    *(START, ASSISTANT_ID),
]
BOS, OPEN, CLOSE, END = 276, 278, 279, 280  # <|start_header_id|> <|end_header_id|> <|eot_id|>
LLAMA = [
    BOS,
    *(OPEN, SYSTEM_ID, CLOSE, *b"\n\nBe brief.", END),
    *(OPEN, USER_ID, CLOSE, *b"\n\n", *HI, END),
    *(OPEN, ASSISTANT_ID, CLOSE, *b"\n\n", *YO, END),
    *(OPEN, USER_ID, CLOSE, *b"\n\nok 12345", END),
    *(OPEN, ASSISTANT_ID, CLOSE, *b"\n\n"),
]


GOLDENS = {"gpt_oss": GPT_OSS, "llama": LLAMA}


@pytest.fixture(autouse=True)
def within(monkeypatch):
    """Renders in this process, where a test can set the date and count what is read."""
    templates = text_process._Templates()
    through_json = lambda value: json.loads(json.dumps(value))
    ask = lambda question: through_json(templates.answer(through_json(question)))
    monkeypatch.setattr(chat_templates, "_renderer", SimpleNamespace(ask=ask))
    for name in ("limit_time", "limit_memory"):
        monkeypatch.setattr(text_process, name, lambda amount: None)


@pytest.fixture(autouse=True)
def date(monkeypatch):
    """Harmony writes today's date."""
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)

    monkeypatch.setattr(chat_template_utils, "datetime", Today)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def connect(*args):
        raise AssertionError("a folder is enough; nothing may be fetched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


@pytest.mark.parametrize("family", GOLDENS)
def test_a_conversation_becomes_the_golden_tokens(tokenizers, family):
    assert tokenizers[family].chat(TALK) == GOLDENS[family]


@pytest.mark.parametrize("talk", [[USER], [SYSTEM, USER], TALK, [USER, REPLY, AGAIN]], ids=len)
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_is_what_transformers_does(folders, tokenizers, family, talk):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[family])
    expected = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert tokenizers[family].chat(talk) == expected


@pytest.mark.parametrize(
    ("family", "variables", "text"),
    [
        ("qwen", {"enable_thinking": True}, "Hi €\nassistant\n"),
        ("qwen", {"enable_thinking": False}, "Hi €\nassistant\n<think>\n\n</think>\n\n"),
        ("gpt_oss", {"reasoning_effort": "low"}, "systemDate: 2026-01-31\nReasoning: lowuserHi"),
        ("gemma", {"enable_thinking": True}, "system\n\nuser\nHi €\nmodel\n"),
        ("gemma", {"enable_thinking": False}, "user\nHi €\nmodel\n"),
        ("llama", {"unknown": 1}, "user\n\nHi €assistant\n\n"),
    ],
)
def test_templates_take_variables(tokenizers, family, variables, text):
    tokenizer = tokenizers[family]
    assert text in tokenizer.decode(tokenizer.chat([USER], **variables))


@pytest.mark.parametrize(("family", "bos"), [("llama", BOS), ("gemma", 2)])
def test_a_bos_token_comes_once(tokenizers, family, bos):
    tokenizer = tokenizers[family]
    text = {"llama": "<|begin_of_text|>", "gemma": "<bos>"}[family]
    assert tokenizer.chat(TALK).count(bos) == 1
    assert tokenizer.encode("Hi") == [bos, *tokenizer.encode("Hi", special=False)]
    assert tokenizer.encode(f"{text}Hi") == tokenizer.encode("Hi")
    assert tokenizer.encode("") == tokenizer.encode(text) == [bos]


def test_no_token_is_dropped_where_the_tokenizer_adds_none(tokenizers):
    assert tokenizers["qwen"].encode("<|im_end|><|im_end|>") == [278, 278]
    assert tokenizers["qwen"].encode("aa") == [*b"aa"]


def test_a_prompt_is_never_cut_to_a_length_that_training_used(tmp_path):
    backend = FAMILIES["llama"][0]()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(FAMILIES["llama"][1]["chat_template"])
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("Hello") == [BOS, *b"Hello"]
    settings = {"bos_token": "<|begin_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer.chat(TALK) == LLAMA


def rewrite(folder, **changes) -> Tokenizer:
    """Changes tokenizer_config.json; None removes a key."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in settings.items() if one is not None}))
    return Tokenizer(folder)


def test_a_list_of_named_templates_has_a_default(tmp_path):
    template = FAMILIES["llama"][1]["chat_template"]
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    write("llama", tmp_path)
    assert rewrite(tmp_path, chat_template=named).chat(TALK) == LLAMA
    with pytest.raises(ConfigError, match=r"no default.*tool_use"):
        rewrite(tmp_path, chat_template=named[:1]).chat(TALK)


def test_the_template_file_goes_before_the_setting(tmp_path):
    write("gpt_oss", tmp_path)
    assert rewrite(tmp_path, chat_template="old").chat(TALK) == GPT_OSS


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "TokenizerOfTomorrow"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}},
        {"bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>", "special": True}},
    ],
    ids=["unknown class", "no class", "code of its own", "token in full"],
)
def test_only_the_template_and_its_tokens_matter(tmp_path, settings):
    write("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "model_of_tomorrow"}')
    assert rewrite(tmp_path, **settings).chat(TALK) == LLAMA
    (tmp_path / "config.json").unlink()
    assert Tokenizer(tmp_path).chat(TALK) == LLAMA


def test_a_model_without_a_template_says_so(tmp_path):
    write("llama", tmp_path)
    with pytest.raises(
        ConfigError, match=r"^this model has no chat template; send a plain prompt$"
    ):
        rewrite(tmp_path, chat_template=None).chat([USER])


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (None, [USER, AGAIN], "the chat template failed: roles must alternate"),
        (None, [], "the chat template failed: .*empty"),
        ("{{ messages[0].content + '' }}", [{"role": "user"}], "failed: .*no attribute 'content'"),
        ("{% if %}", [USER], "the chat template failed: .*expression"),
        ("{{ 1 / 0 }}", [USER], "the chat template failed: division by zero"),
    ],
)
def test_a_template_that_fails_is_a_config_error(tmp_path, template, talk, message):
    write("gemma", tmp_path)
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer(tmp_path).chat(talk)
    assert str(tmp_path) not in str(caught.value)  # servers send the message to clients


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "tokenizer_config.json: not valid JSON"),
        (b"\xff", "tokenizer_config.json: not valid JSON"),
        (b"[]", "tokenizer_config.json: not a JSON object"),
    ],
)
def test_broken_settings_show_at_once(tmp_path, content, message):
    write("llama", tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("settings", [{"chat_template": 7}, {"added_tokens_decoder": 7}])
def test_settings_that_make_no_sense_are_a_config_error(tmp_path, settings):
    write("llama", tmp_path)
    tokenizer = rewrite(tmp_path, **settings)
    with pytest.raises(ConfigError, match="chat template"):
        tokenizer.chat([USER])
    assert tokenizer.encode("Hi") == [BOS, *b"Hi"]


def test_the_embedded_model_continues_the_last_message():
    tokenizer = Tokenizer(embedded("target"))
    talk = [dict(role="system", content="import os"), dict(role="user", content="def main():")]
    assert tokenizer.chat(talk) == tokenizer.encode("import os\ndef main():")
