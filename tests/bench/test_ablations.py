"""`peagle-bench ablations` on a tiny random model."""

import json

import numpy as np
import pytest

from bench import ablations
from bench.__main__ import main
from bench.head_tables import ablations_table, drafts_of
from bench.headroom import measure, stored_texts, summary
from bench.report import newest
from peagle_jax.checkpoint import load_head, load_target
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

    def run(*cells, rest=SMALL, num_draft=2) -> int:
        numbers = ["--steps", "2", "--batch", "4", "-K", str(num_draft)]
        numbers += ["--dtype", "float32", "--no-cache", "--sha", "abc"]
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


@pytest.mark.slow
def test_a_head_that_files_do_not_hold_is_measured_too(command, folders, tmp_path):
    cells = ("mixed-picked", "mixed-picked-hidden-both")
    assert command(*cells) == 0
    row, varied = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert varied["options"] == f"{row['options']} --hidden both"
    assert varied["validation"].keys() == row["validation"].keys()
    assert varied["sets"]["few"].keys() == row["sets"]["few"].keys()
    written = {folder.name: (folder / "final").exists() for folder in (tmp_path / "runs").iterdir()}
    assert sorted(written.values()) == [False, True]
    (unwritten,) = (name for name, has_final in written.items() if not has_final)
    assert unwritten.startswith("mixed-picked-hidden-both")
    # What is measured is the head as the file has it.
    target = load_target(folders.target, dtype="float32")
    (stored,) = (tmp_path / "runs").glob("*/final")
    found = measure(
        target, load_head(stored, target.config, dtype="float32"),
        stored_texts(tmp_path / "texts" / "few.npz", None), num_draft=2, dtype="float32", bucket=64,
    )  # fmt: skip
    length = summary(found)["acceptance_length"]
    assert row["sets"]["few"]["acceptance_length"] == pytest.approx(length, rel=1e-4)


def _row(num_draft: int, cell: str = "mixed") -> dict:
    lengths = dict(acceptance_length=1.0 + num_draft / 8, fresh_acceptance_length=1.0)
    few = lengths | dict(acceptance_per_position=[0.5] * num_draft)
    return dict(
        kind="ablation", cell=cell, steps=2, seed=0, batch=4, learning_rate=3e-3, texts="text",
        options="--method peagle", ms_per_step=1.0, validation=lengths | dict(loss=1.0), sets=dict(few=few),
        device="a GPU", jax="1", sha="abc", date="2026-01-01",
    )  # fmt: skip


def test_a_cell_has_a_row_for_each_number_of_drafts(command, tmp_path, monkeypatch):
    """Rows of before `num_draft` was a field are those of the number that they measured."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(_row(7)) + "\n")
    trained = []

    def train(options, cell):
        trained.append(options.num_draft)
        return {k: _row(options.num_draft)[k] for k in ("validation", "sets", "ms_per_step")}

    monkeypatch.setattr(ablations, "_train", train)
    for num_draft in (7, 5, 5, 7, 3):
        assert command("mixed", num_draft=num_draft) == 0
    assert trained == [5, 3]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row.get("num_draft") for row in rows] == [None, 5, 3]
    assert [drafts_of(row) for row in newest([*rows, _row(7) | dict(num_draft=7)])] == [7, 5, 3]


def test_tables_have_rows_of_one_number_of_drafts():
    rows = [_row(7), _row(5) | dict(num_draft=5), _row(7, "greedy")]
    first, second = ablations_table(rows).split("**a GPU**")[1:]
    assert "at K = 7" in first
    assert first.count("| 2 |") == 2
    assert "at K = 5" in second
    assert second.count("| 2 |") == 1
    assert ablations_table(rows[:1]) == ablations_table([rows[0] | dict(num_draft=7)])


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
