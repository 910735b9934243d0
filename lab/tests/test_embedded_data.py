"""`python -m lab.embedded data`: tokenizer, streams, prompts; text that is cut at random places."""

import json
import random
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lab.embedded import data
from lab.embedded.exercises import exercises
from lab.embedded.functions import MAX_LINES, functions
from peagle_jax.config import ConfigError

SOURCE = textwrap.dedent('''
    import os

    def plain(x):
        """Adds one."""
        return x + 1

    class Thing:
        async def method(self):
            """Waits."""
            await self.other()

        @property
        def decorated(self):
            """Has a decorator."""
            return 1

    def silent(x):
        y = x
        return y

    def one_line(): "Has two lines."; return 1
''')
PLAIN = 'def plain(x):\n    """Adds one."""\n    return x + 1\n'
METHOD = 'async def method(self):\n    """Waits."""\n    await self.other()\n'


def test_undecorated_functions_with_docstrings_are_cut_out_and_dedented():
    assert functions(SOURCE) == [PLAIN, METHOD]
    assert functions(PLAIN.replace("    return", "    x += 1\n" * MAX_LINES + "    return")) == []
    assert functions("def broken(:\n    pass\n") == []


def test_pieces_are_the_text_and_half_of_the_cuts_are_line_starts():
    text, rng = Path(data.__file__).read_text(), random.Random(0)
    for every in (1, 50, 10 * len(text)):
        pieces = data.cut_at_random(text, every, rng)
        assert "".join(pieces) == text
        assert all(pieces)
    ends = [piece[-1] == "\n" for piece in data.cut_at_random(text, 50, rng)]
    assert 0.4 < np.mean(ends) < 0.7
    assert data.cut_at_random(text, 0, rng) == [text]


def _prepared(out: Path, **options) -> tuple[dict, list[str], np.ndarray]:
    """(report, documents of the training stream, held-out stream)."""
    base = dict(folders=(Path(data.__file__).parent,), vocab_size=400, num_prompts=20, seed=0)
    base |= dict(sample_bytes=20_000, max_bytes=100_000)
    report = data.prepare(data.DataOptions(**base, **options), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stream = np.load(out / "train.npy")
    text = tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    return report, text.split(data.END), np.load(out / "heldout.npy")


@pytest.mark.slow
def test_the_stream_has_files_functions_and_exercises_and_held_out_text_has_files(tmp_path):
    _, alone, heldout = _prepared(tmp_path / "files")
    report, both, same = _prepared(
        tmp_path / "both", function_copies=2, exercises=50, cut_every=100
    )
    assert report["functions"] > 10
    added = Counter(both)
    added.subtract(alone)
    assert set(exercises(50, seed=0)) <= set(added)
    copies = [n for text, n in added.items() if text.startswith(("def ", "async def ")) and n == 2]
    assert len(copies) == report["functions"]
    assert sum(added.values()) == 2 * report["functions"] + 50
    np.testing.assert_array_equal(heldout, same)
    rows = (tmp_path / "both" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["prompt"] for row in rows]
    assert 10 < len(prompts) <= 20
    assert all(prompt.strip() for prompt in prompts)


def test_files_that_are_all_rejected_are_counted(tmp_path):
    (tmp_path / "short.py").write_text("pass\n")
    options = data.DataOptions(
        folders=(tmp_path,), vocab_size=300, sample_bytes=9, max_bytes=9, num_prompts=1, seed=0
    )
    with pytest.raises(ConfigError, match=r"no Python file to train on; 1 rejected: size$"):
        data.prepare(options, tmp_path / "out")
    assert not (tmp_path / "out").exists()
