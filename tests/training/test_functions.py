"""Functions with docstrings as documents of their own (`peagle-train data --function-copies`)."""

import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from peagle_jax.training import data
from peagle_jax.training.functions import MAX_LINES, functions, functions_of

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


def test_long_functions_and_files_that_do_not_parse_have_none():
    longer = PLAIN.replace("    return", "    x += 1\n" * MAX_LINES + "    return")
    assert functions(longer) == []
    assert functions("def broken(:\n    pass\n") == []
    assert functions("x = '\0'") == []


def test_functions_come_in_the_order_of_their_files():
    renamed = [PLAIN.replace("plain", f"f{i}") for i in range(150)]
    assert list(functions_of(renamed)) == renamed


def test_the_stream_holds_each_function_as_often_as_asked_and_held_out_files_none(tmp_path):
    options = dict(
        folders=(Path(data.__file__).parent,), vocab_size=400, sample_bytes=20_000,
        max_bytes=200_000, num_headers=10, seed=0,
    )  # fmt: skip
    data.prepare(data.DataOptions(**options), tmp_path / "files")
    report = data.prepare(
        data.DataOptions(**options, function_copies=2), tmp_path / "with-functions"
    )
    alone, both = (
        np.load(tmp_path / folder / "train.npy") for folder in ("files", "with-functions")
    )
    count = lambda stream: int((stream == data.END_ID).sum())
    assert report["functions"] > 10
    assert count(both) == count(alone) + 2 * report["functions"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "files" / "tokenizer.json"))
    documents = tokenizer.decode(both.tolist(), skip_special_tokens=False).split(data.END)
    copies = Counter(text for text in documents if text.startswith(("def ", "async def ")))
    assert len(copies) == report["functions"]
    assert set(copies.values()) == {2}
    held_out = [np.load(tmp_path / f / "heldout.npy") for f in ("files", "with-functions")]
    np.testing.assert_array_equal(*held_out)
