"""`peagle-bench ablations` on a tiny random model."""

import json

import numpy as np
import pytest

from bench import ablations
from bench.__main__ import main
from tests.cli.conftest import VOCAB

SMALL = "--layers 1 --taps 0 1 2 --depths 2 --mask-token-id 1 --loss-chunk 64 --eval-sequences 4 --warmup 1"


def _write(path, count: int):
    tokens = np.random.default_rng(0).integers(8, VOCAB, (count, 24)).astype(np.uint16)
    path.parent.mkdir(exist_ok=True)
    fields = dict(prompt=np.full(count, 6, np.int32), length=np.full(count, 24, np.int32))
    np.savez(path, tokens=tokens, temperature=np.zeros(count, np.float32), **fields)


@pytest.fixture
def command(folders, tmp_path):
    _write(tmp_path / "text" / "train.npz", 8)
    _write(tmp_path / "text" / "heldout.npz", 4)
    _write(tmp_path / "texts" / "few.npz", 3)
    places = [f"--{name}={tmp_path / name}" for name in ("text", "texts", "runs")]
    places += [f"--out={tmp_path / 'rows.jsonl'}", f"--model={folders.target}"]

    def run(*cells, rest=SMALL) -> int:
        numbers = [
            "--steps",
            "2",
            "--batch",
            "4",
            "-K",
            "2",
            "--dtype",
            "float32",
            "--no-cache",
            "--sha",
            "abc",
        ]
        options = ["--train-options", *rest.split()]
        return main(["ablations", *places, *numbers, "--cells", *cells, *options])

    return run


@pytest.mark.slow
def test_a_cell_is_trained_once_and_measured(command, tmp_path, monkeypatch, capsys):
    assert command("greedy") == 0
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["cell"] == "greedy"
    assert row["ms_per_step"] > 0
    assert row["validation"]["acceptance_length"] >= 1
    assert row["sets"]["few"]["acceptance_length"] >= 1
    monkeypatch.setattr(ablations, "train", None)
    capsys.readouterr()
    assert command("greedy") == 0, "a cell with a row is not trained again"
    assert "few" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [("cell", "unknown cell 'nonsense'; known are mixed"), ("text", "heldout.npz: no such file")],
)
def test_mistakes_are_one_line(command, tmp_path, capsys, change, message):
    if change == "text":
        (tmp_path / "text" / "heldout.npz").unlink()
    assert command("nonsense" if change == "cell" else "mixed") == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("cell", ablations.CELLS)
def test_cells_are_commands_that_peagle_train_takes(cell):
    given = ["drafter", *ablations.CELLS[cell].split()]
    needed = ["--target", "t", "--text", "x", "--out", "o", "--steps", "1"]
    assert ablations.training_parser().parse_args([*given, *needed]).stage == "drafter"
