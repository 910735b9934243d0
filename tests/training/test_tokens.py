"""`peagle-train data` with the tokenizer of a target that exists."""

from pathlib import Path

import numpy as np
import pytest

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
