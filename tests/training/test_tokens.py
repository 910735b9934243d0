"""`peagle-train data`: the tokenizer of a target that exists, and texts that are cut at random places."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from peagle_jax.config import ConfigError
from peagle_jax.training import data

SOURCE = Path(data.__file__).parent


def _options(tokenizer: Path | None = None) -> data.DataOptions:
    return data.DataOptions(
        folders=(SOURCE,), vocab_size=400, sample_bytes=20_000, max_bytes=100_000, num_headers=10,
        seed=0, tokenizer=tokenizer,
    )  # fmt: skip


def test_text_is_encoded_with_the_tokenizer_given(tmp_path):
    data.prepare(_options(), tmp_path / "first")
    made = tmp_path / "first" / "tokenizer.json"
    report = data.prepare(_options(made), tmp_path / "second")
    assert report["vocab_size"] == 400
    for name in ("train.npy", "heldout.npy"):
        first, second = (np.load(tmp_path / folder / name) for folder in ("first", "second"))
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no tokenizer can be read"), ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "ids 0, 1 and 2")],
)  # fmt: skip
def test_a_file_that_is_no_such_tokenizer_is_refused(tmp_path, text, message):
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        data.prepare(_options(file), tmp_path / "out")


def test_pieces_are_the_text_and_half_of_the_cuts_are_line_starts():
    text = Path(data.__file__).read_text()
    rng = random.Random(0)
    for every in (1, 50, 10 * len(text)):
        pieces = data.cut_at_random(text, every, rng)
        assert "".join(pieces) == text
        assert all(pieces)
    counts = [len(data.cut_at_random(text, 200, rng)) for _ in range(20)]
    assert abs(np.mean(counts) - len(text) / 200) < 0.1 * len(text) / 200
    ends = [piece[-1] == "\n" for piece in data.cut_at_random(text, 50, rng)]
    assert 0.4 < np.mean(ends) < 0.7
    assert data.cut_at_random("x", 1, rng) == ["x"]


def test_training_text_is_cut_and_held_out_text_is_not(tmp_path):
    plain, cut = _options(), replace(_options(), cut_every=100)
    data.prepare(plain, tmp_path / "plain")
    report = data.prepare(cut, tmp_path / "cut")
    assert report["cut_every"] == 100
    tokenizer = Tokenizer.from_file(str(tmp_path / "cut" / "tokenizer.json"))
    newline = tokenizer.encode("\n").ids
    streams = {
        (folder, name): np.load(tmp_path / folder / f"{name}.npy")
        for folder in ("plain", "cut")
        for name in ("train", "heldout")
    }
    texts = [tokenizer.decode(streams[folder, "train"]) for folder in ("plain", "cut")]
    assert texts[0] == texts[1]
    np.testing.assert_array_equal(streams["plain", "heldout"], streams["cut", "heldout"])
    # A newline before an indentation is a token of its own only where the text is cut.
    lone = lambda stream: np.isin(stream, newline).sum()
    assert lone(streams["cut", "train"]) > lone(streams["plain", "train"])
