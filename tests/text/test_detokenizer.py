"""Incremental text of each family's tokenizer: any text, any tokens, cut anywhere."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from peagle_jax.config import ConfigError
from peagle_jax.text.tokenizer import Detokenizer, Tokenizer
from tests.text.families import FAMILIES, FIRST_BYTE

FUZZ = settings(deadline=None, derandomize=True)
BROKEN = "\ufffd"
BYTE_LEVEL = ("qwen", "gpt_oss", "llama")
HARD = "👩\u200d👩\u200d👧\ufe0f e\u0301 ñ 中文 \U0001f1e9\U0001f1ea \U0010ffff \ufffd \x00▁<0xE2>Ġ"
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from([*HARD.split(" "), " ", "  ", "\n", "user"])
).map("".join)
CUTS = st.lists(st.integers(0, 6))
"""Sizes of the pieces; what they leave over is one more."""


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    found = []
    for size in cuts:
        found.append(tokens[:size])
        tokens = tokens[size:]
    return [*found, tokens]


def check(tokenizer: Tokenizer, tokens: list[int], cuts: list[int]) -> str:
    """Streams tokens: what is shown stays, lags three characters at most, and ends complete."""
    detokenizer, shown, seen = Detokenizer(tokenizer), "", []
    full = tokenizer.decode(tokens)
    for piece in pieces(tokens, cuts):
        shown += detokenizer.add(piece)
        seen += piece
        assert full.startswith(shown)
        now = tokenizer.decode(seen)
        assert now.startswith(shown)
        assert len(now) - len(shown) <= 3
    assert shown + detokenizer.flush() == full
    return full


@pytest.mark.parametrize("family", FAMILIES)
def test_text_comes_back_whole(num_cases, tokenizers, family):
    @settings(FUZZ, max_examples=num_cases("texts streamed in pieces", 300))
    @given(text=TEXTS, cuts=CUTS)
    @example(text=HARD, cuts=[1] * 200)
    def try_one(text, cuts):
        tokenizer = tokenizers[family]
        tokens = tokenizer.encode(text, special=False)
        full = check(tokenizer, tokens, cuts)
        assert full == tokenizer._backend.decode(tokens)

    try_one()


def ids(tokenizer: Tokenizer, first_byte: int) -> st.SearchStrategy[list[int]]:
    """Any ids, some beyond the vocabulary; half of them bytes beyond ASCII."""
    high = st.integers(first_byte + 0x80, first_byte + 0xFF)
    return st.lists(high | st.integers(0, tokenizer.vocab_size + 3), max_size=40)


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_any_bytes_decode_as_the_library_does(num_cases, tokenizers, family):
    @settings(FUZZ, max_examples=num_cases("texts streamed in pieces", 300))
    @given(data=st.data(), cuts=CUTS)
    def try_one(data, cuts):
        tokenizer = tokenizers[family]
        tokens = data.draw(ids(tokenizer, first_byte=0))
        assert check(tokenizer, tokens, cuts) == tokenizer._backend.decode(tokens)

    try_one()


def test_any_byte_tokens_decode_as_their_bytes_do(num_cases, tokenizers):
    @settings(FUZZ, max_examples=num_cases("texts streamed in pieces", 300))
    @given(data=st.data(), cuts=CUTS)
    def try_one(data, cuts):
        tokenizer = tokenizers["gemma"]
        tokens = data.draw(ids(tokenizer, first_byte=FIRST_BYTE))
        full = check(tokenizer, tokens, cuts)
        library = tokenizer._backend.decode(tokens)
        assert BROKEN in full if BROKEN in library else full == library

    try_one()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_is_shown_with_its_last_byte(tokenizers, family):
    tokenizer = tokenizers[family]
    tokens = tokenizer.encode("👋\U0010ffff", special=False)
    detokenizer = Detokenizer(tokenizer)
    assert len(tokens) == 8
    increments = ["", "", "", "👋", "", "", "", "\U0010ffff"]
    assert [detokenizer.add([token]) for token in tokens] == increments


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xF0])
def test_a_run_of_bad_bytes_is_neither_held_back_nor_read_again(
    tokenizers, family, byte, monkeypatch
):
    tokenizer = tokenizers[family]
    token = byte + (FIRST_BYTE if family == "gemma" else 0)
    table, asked = tokenizer.bytes_table(), []

    class Asked:
        def __getitem__(self, token: int) -> bytes:
            asked.append(token)
            return table[token]

    monkeypatch.setattr(Tokenizer, "bytes_table", lambda *args: Asked())
    detokenizer, shown = Detokenizer(tokenizer), 0
    for number in range(1, 3001):
        shown += len(detokenizer.add([token]))
        assert shown >= number - 1
        assert len(asked) == number
    assert detokenizer.flush() == BROKEN * (3000 - shown)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_and_unknown_ids_show_nothing(tokenizers, family):
    tokenizer = tokenizers[family]
    special = {"qwen": 277, "gpt_oss": 282, "llama": 280, "gemma": 379}[family]
    hi = tokenizer.encode("Hi", special=False)
    assert tokenizer.decode([special, *hi, special, 10**6, *hi]) == "HiHi"


DECODERS = {
    "llama 2": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Metaspace(),
    "metaspace without a prefix": decoders.Metaspace(prepend_scheme="never"),
    "words": None,
}


def with_decoder(folder: Path, decoder: decoders.Decoder | None) -> Tokenizer:
    """Gemma's tokenizer with another decoder."""
    path = folder / "tokenizer.json"
    FAMILIES["gemma"][0]().save(str(path))
    raw = json.loads(path.read_text())
    raw["decoder"] = decoder and json.loads(decoder.__getstate__())
    path.write_text(json.dumps(raw))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, Tokenizer]:
    make = lambda decoder: with_decoder(tmp_path_factory.mktemp("tokenizer"), decoder)
    return {name: make(decoder) for name, decoder in DECODERS.items()}


@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders_agree_with_the_library(num_cases, others, name):
    @settings(FUZZ, max_examples=num_cases("texts streamed in pieces", 300))
    @given(text=st.text("ab €中\n👋"), cuts=CUTS)
    def try_one(text, cuts):
        tokenizer = others[name]
        tokens = tokenizer.encode(text, special=False)
        assert check(tokenizer, tokens, cuts) == tokenizer._backend.decode(tokens)

    try_one()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path, decoder):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder .* is not supported"):
        with_decoder(tmp_path, decoder)


def test_half_of_a_surrogate_pair_is_a_config_error(tokenizers):
    with pytest.raises(ConfigError, match="not a valid Unicode string"):
        tokenizers["qwen"].encode("\udc80")
