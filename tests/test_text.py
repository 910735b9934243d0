"""Incremental detokenisation equals decoding at once, also for bytes that are no text."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from peagle_jax.config import ConfigError
from peagle_jax.engine.host.request import Request
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import StopChecker, TextStream, Tokenizer

SAMPLE = "def größe(ключ: str) -> int:\n    return 值 * 2  # naïve 😀 👩‍👩‍👧 ½ … “quoted”\n" * 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A byte-level BPE so small that most characters beyond ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def in_pieces(tokens: list[int], rng: random.Random) -> list[list[int]]:
    pieces, start = [], 0
    while start < len(tokens):
        size = rng.randint(1, 4)
        pieces.append(tokens[start : start + size])
        start += size
    return pieces


def checked(tokenizer, text: str, stops: tuple[str, ...]) -> tuple[str | None, int]:
    """The stop string found while `text` grows token by token, and the number of tokens then."""
    check, tokens = StopChecker(tokenizer, stops), tokenizer.encode(text)
    for size in range(1, len(tokens) + 1):
        found = check(tokens[:size])
        if found is not None:
            return found, size
    return None, len(tokens)


@pytest.mark.parametrize(
    "stops", [("return",), ("int:\n    ret",), ("😀",), ("値", "值 *"), ("naïve 😀 👩", "zzz")]
)
def test_a_stop_string_is_found_across_token_borders(tokenizer, stops):
    found, size = checked(tokenizer, SAMPLE, stops)
    assert found in stops
    text = tokenizer.decode(tokenizer.encode(SAMPLE)[:size])
    assert found in text
    shorter = tokenizer.decode(tokenizer.encode(SAMPLE)[: size - 1])
    assert found not in shorter


def test_the_earliest_of_several_stop_strings_is_named(tokenizer):
    assert StopChecker(tokenizer, ("turn", "et", "rn"))(tokenizer.encode(" return")) == "et"


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_shows_exactly_the_text_before_the_stop_string(tokenizer, seed):
    rng = random.Random(seed)
    start = rng.randrange(len(SAMPLE) - 20)
    stop = SAMPLE[start : start + rng.randint(1, 12)]
    stream, shown = TextStream(tokenizer, (stop, "not there")), ""
    expected = SAMPLE[: SAMPLE.find(stop)]
    for piece in in_pieces(tokenizer.encode(SAMPLE), rng):
        shown += stream.add(piece)
        assert expected.startswith(shown)
    assert shown + stream.finish() == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_ends_the_text_only_after_the_least_tokens(tokenizer, seed):
    """The stream and a request's own check agree on the first that ends late enough."""
    rng = random.Random(seed)
    tokens = tokenizer.encode(SAMPLE)
    start = rng.randrange(40)
    stops = (SAMPLE[start : start + rng.randint(1, 6)], SAMPLE[start : start + 1], "not there")
    least = rng.randrange(len(tokens) // 2)
    early = len(tokenizer.decode(tokens[:least]).rstrip("\ufffd"))
    places = [(SAMPLE.find(stop, max(0, early - len(stop) + 1)), stop) for stop in stops[:2]]
    end, stop = min(places)
    stream, shown = TextStream(tokenizer, stops, min_tokens=least), ""
    for piece in in_pieces(tokens, rng):
        shown += stream.add(piece)
    assert shown + stream.finish() == SAMPLE[:end]
    request = Request(
        id=0,
        prompt=[1],
        num_draft=0,
        seed=0,
        stop_checker=StopChecker(tokenizer, stops),
        params=SamplingParams(max_tokens=len(tokens), stop=stops, min_tokens=least),
    )
    request.append(tokens, eos_ids=(), max_model_len=10**6)
    assert request.stop_reason == stop
    assert least < len(request.output) <= len(tokenizer.encode(SAMPLE[: end + len(stop)])) + 2


def test_a_stream_gives_back_what_only_looked_like_a_stop_string(tokenizer):
    stream = TextStream(tokenizer, ("return 7",))
    assert stream.add(tokenizer.encode("x\nretur")) == "x\n"
    assert stream.add(tokenizer.encode("ned")) == "returned"
    assert stream.add(tokenizer.encode(" retur")) == " "
    assert stream.finish() == "retur"


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        Tokenizer(tmp_path)
