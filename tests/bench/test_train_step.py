"""`peagle-bench train-step` on a tiny random model."""

import json

import pytest

from bench.__main__ import main
from bench.head_tables import train_step_table

SMALL = "--layers 1 --taps 0 1 2 --depths 2 --mask-token-id 1 --loss-chunk 64 --eval-sequences 4"


@pytest.mark.slow
def test_every_step_has_a_row(folders, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    line = f"train-step --model {folders.target} --dtype float32 --no-cache --sha abc --out {out} --steps 1"
    forms = "--forms picked eagle3-picked --shapes 4x16 2x32"
    assert main([*line.split(), *forms.split(), "--train-options", *SMALL.split()]) == 0
    found = [json.loads(row) for row in out.read_text().splitlines()]
    assert [(row["form"], row["texts"], row["tokens"]) for row in found] == [
        ("picked", 4, 16), ("eagle3-picked", 4, 16), ("picked", 2, 32), ("eagle3-picked", 2, 32),
    ]  # fmt: skip
    for row in found:
        assert row["ms_per_step"] > 0
        assert row["memory_gib"] > 0
        assert row["sha"] == "abc"
    table = train_step_table(found)
    assert table.index("EAGLE-3, half") < table.index("2 x 32")
    assert "`--layers 1" in table
    assert "eagle3-picked" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["64", "64x", "x512", "0x512", "64x512x2", "ax2"])
def test_a_shape_is_a_number_of_texts_and_of_tokens(shape, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train-step", "--shapes", shape])
    assert end.value.code == 2
    assert "TEXTSxTOKENS" in capsys.readouterr().err
