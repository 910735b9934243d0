"""Tokenizers of GGUF metadata against transformers' own reading of the same metadata."""

import pytest
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from peagle_jax.checkpoint.gguf_folder import write_folder
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.target_json import target_config
from peagle_jax.text.tokenizer import Tokenizer
from tests.gguf_files import write_golden
from tests.gguf_tokenizers import LINES, SENTENCEPIECE, SPACED, Stored, add_tokenizer, byte_level

TEXTS = [
    *LINES,
    "<|im_start|>user\nHi<|im_end|>",
    "a <think> b",
    "don't DON'T 12345678 \t\n\n x",
    "né 🙂",
]


def read(tmp_path, stored: Stored, *, template: str | None = None, **more) -> Tokenizer:
    def meta(writer):
        add_tokenizer(writer, stored, **more)
        if template is not None:
            writer.add_chat_template(template)

    write_golden("llama", tmp_path / "model.gguf", meta=meta, vocab_size=len(stored.tokens))
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    return Tokenizer(tmp_path / "folder")


def expected(stored: Stored, architecture: str, **more):
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    given = {names.get(key, key): value for key, value in stored.metadata(**more).items()}
    return convert_gguf_tokenizer(architecture, given)[0]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken"])
def test_byte_level_tokens_are_those_of_transformers(tmp_path, pre):
    ours, theirs = read(tmp_path, byte_level(), pre=pre), expected(byte_level(), "llama", pre=pre)
    for text in TEXTS:
        ids = ours.encode(text, special=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.spell(ids) == text


@pytest.mark.parametrize(
    ("stored", "architecture"),
    [(SENTENCEPIECE, "llama"), (SPACED, "gemma4")],
    ids=["llama", "gemma4"],
)
def test_tokens_with_spaces_are_those_of_transformers(tmp_path, stored, architecture):
    ours = read(tmp_path, stored, unknown_token_id=0, add_bos_token=False)
    theirs = expected(stored, architecture)
    for text in [line for line in TEXTS if "<" not in line]:
        ids = ours.encode(text, special=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def test_smollm_cuts_numbers_into_digits(tmp_path):
    ours = read(tmp_path, byte_level(), pre="smollm")
    digits = ours.encode("1234567", special=False)
    assert [ours.decode([token]) for token in digits] == list("1234567")


@pytest.mark.parametrize("flag", [True, False, None])
def test_bos_stands_before_a_text_as_the_file_says(tmp_path, flag):
    more = {} if flag is None else {"add_bos_token": flag}
    ids = read(tmp_path, SENTENCEPIECE, **more).encode("The fox")
    assert (ids[0] == 1) == (flag is not False)  # llama.cpp's default for SentencePiece


def test_special_tokens_and_the_template_are_in_the_folder(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    ours = read(tmp_path, byte_level(), pre="qwen2", template=template)
    start, end = (byte_level().tokens.index(f"<|im_{part}|>") for part in ("start", "end"))
    assert ours.special_ids == {start, end}
    eos = byte_level().tokens[2]  # the checkpoint's
    assert ours.chat_text([{"role": "user", "content": "Hi"}]) == f"<|im_start|>Hi{eos}"
    assert target_config(tmp_path / "folder").eos_ids == (2, end)


@pytest.mark.parametrize(
    ("stored", "more", "message"),
    [
        (byte_level(), {"pre": "bloom"}, r"pre 'bloom' is not supported"),
        (byte_level(), {}, r"pre '' is not supported"),
        (byte_level(), {"pre": "qwen2", "model": "t5"}, r"tokenizer\.ggml\.model 't5'"),
        (byte_level(), {"pre": "qwen2", "merges": ["abc"]}, r"a merge is not of two tokens"),
        (byte_level(), {"pre": "qwen2", "merges": ["x yz"]}, r"tokenizer\.ggml: "),
        (SENTENCEPIECE, {"scores": [1.0]}, "scores is not as long as tokens"),
        (SENTENCEPIECE, {"token_type": [1, 2]}, r"token_type is not as long as tokens"),
        (SENTENCEPIECE, {"padding_token_id": 99999}, r"padding_token_id 99999 is no token"),
    ],
)
def test_a_tokenizer_that_would_be_another_is_refused(tmp_path, stored, more, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, stored, **more)
