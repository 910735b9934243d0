"""`peagle-bench structured` on a tiny model that writes JSON."""

import pytest

from bench import structured
from bench.commands.structured import Options
from peagle_jax import Engine
from peagle_jax.structured import Structured
from tests import tiny
from tests.json_vocabulary import END, json_tokenizer
from tests.programs import OneBucketConfig


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Programs of their own: those that the other files share know no masks."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    tokenizer = json_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    # With one layer it writes line breaks, of which none is forced.
    target = tiny.target(eos_ids=(tokenizer.added[END],))
    config = OneBucketConfig(num_draft=3, max_num_seqs=2, max_model_len=128, prefill_chunk=32)
    return Engine(target, tiny.head(), config, tokenizer=tokenizer)


@pytest.mark.exhaustive
def test_forced_tokens_are_drafted_in_their_mode_only(engine):
    options = Options(max_tokens=24, repeats=1)
    measured = {mode: structured._write(engine, mode, 2, options) for mode in structured.MODES}
    for row in measured.values():
        assert row["ms_per_round"] > 0
        assert row["texts"] == 6
    # The rounds emit one token beyond the accepted drafts, and a random drafter is hardly ever right.
    assert measured["forced"]["acceptance_length"] > measured["masks"]["acceptance_length"]
    assert measured["free"]["complete"] == 0
    parts = structured._parts(engine, "forced", 2, options)
    assert 0 < parts["masks"] < parts["schedule"]
    assert 0 < parts["consume"] < parts["commit"]


@pytest.mark.slow
def test_masks_are_timed_along_the_texts(engine):
    row = structured._masks(engine, 2, 3)
    assert row["vocab_size"] == 128
    assert 0 < row["masks_ms"] <= row["masks_ms_max"]
    assert row["compile_ms"] > 0


def test_texts_that_the_length_ends_are_counted(engine):
    options = Options(max_tokens=24, samples=3)
    short = Structured.json_schema({"type": "boolean"})
    assert structured._ends(engine, short, 1.0, options)["cut"] == 0
    endless = Structured.json_schema({"type": "array", "minItems": 30})
    found = structured._ends(engine, endless, 0.0, options)
    assert found == dict(cut=3, tokens=72)


def test_the_table_has_a_line_for_each_row():
    row = dict(
        method="peagle", num_draft=7, concurrency=1, mode="free", ms_per_round=1.5, acceptance_length=2.0,
        tokens=5, complete=0, texts=1,
    )  # fmt: skip
    header, lines = structured.table(
        [row, row | dict(mode="forced", masks_ms=0.25, compile_ms=1.0)]
    )
    assert [len(line) for line in lines] == [len(header)] * 2
    assert lines[1][-2:] == ["0.25", "1.00"]
