"""Whole trainings, tiny: losses fall, and a run that is killed goes on along the same curve."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.checkpoint import Checkpoint, load_head, save_head
from peagle_jax.config import ConfigError
from peagle_jax.training import drafter, recipe, selector
from peagle_jax.training.__main__ import main
from peagle_jax.training.curves import Curves
from peagle_jax.training.trainer import fit, split_model, write_provenance
from tests import tiny
from tests.training.small import head_options, run_config, save_texts
from tests.waiting import LIMIT


def rows(out: Path, name: str) -> list[dict[str, float]]:
    curves = Curves(out / f"{name}.csv")
    curves.resume(10_000)
    return curves.rows


def train(method: str, out: Path) -> None:
    """A head of two layers for `tiny.TARGET`, in 40 steps; its file lies in `out/final`."""
    save_texts(out / "text", tiny.TARGET.vocab_size, count=32)
    target = tiny.target()
    config = recipe.head_config(target.config, method=method, layers=2, mask_token_id=1)
    config = replace(config, trained_num_draft=3, num_taps=3, taps=(0, 1, 2))
    options = head_options(texts=out / "text", batch=8, num_depths=3, eval_sequences=16)
    run = run_config(out, 40)
    task, merge = drafter.make_task(config, target, options, run)
    write_provenance(out, dict(head=asdict(config), run=asdict(run)))
    save_head(merge(fit(task, run)), out / "final", max_position=512)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Method -> folder of a training, which runs at the first call."""
    root = tmp_path_factory.mktemp("trained")

    def folder(method: str) -> Path:
        if not (root / method).exists():
            (root / method).mkdir()
            train(method, root / method)
        return root / method

    return folder


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("method", ["peagle", "eagle3", "dflash"])
def test_the_losses_fall(trained, method):
    out = trained(method)
    losses = [row["loss"] for row in rows(out, "train")]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    heldout = rows(out, "eval")
    assert [row["step"] for row in heldout] == [20, 40]
    assert heldout[-1]["loss"] < heldout[0]["loss"]
    assert {"accuracy_0", "accuracy_2", "fresh_acceptance_length"} <= heldout[0].keys()
    assert (out / "curves.png").stat().st_size > 10_000
    assert "peagle-train" in (out / "train_command.txt").read_text()
    assert json.loads((out / "train_config.json").read_text())["run"]["steps"] == 40


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("method", ["peagle", "eagle3", "dflash"])
def test_a_head_that_is_trained_further_starts_where_it_ended(trained, method, tmp_path):
    out, target = trained(method), tiny.target()
    head = load_head(out / "final", target.config, dtype="float32")
    head.config = drafter.further_config(head.config, method)
    options = head_options(texts=out / "text", batch=8, num_depths=3, eval_sequences=16)
    task, _ = drafter.make_task(head.config, target, options, run_config(tmp_path, 1), head)
    before = rows(out, "eval")[-1]["loss"]
    assert task.evaluate(task.params)["loss"] == pytest.approx(before, rel=0.02)
    with pytest.raises(ConfigError, match=f"add --method {method}"):
        drafter.further_config(head.config, "another")


@pytest.mark.slow
def test_a_selector_learns_and_leaves_the_head_as_it_is(trained, tmp_path):
    out, target = trained("peagle"), tiny.target()
    head = load_head(out / "final", target.config, dtype="float32")
    options = head_options(texts=out / "text", batch=8, num_depths=3, eval_sequences=16)
    run = run_config(tmp_path, 40, optimizer="adamw", learning_rate=5e-3, decay=0.1)
    task, merge = selector.make_task(head, target, options, run, rank=16)
    save_head(merge(fit(task, run)), tmp_path / "final", max_position=512)
    trained_rows = rows(tmp_path, "train")
    assert trained_rows[-1]["loss"] < trained_rows[0]["loss"]
    assert trained_rows[-1]["accuracy"] > trained_rows[-1]["head_accuracy"]
    assert {"acceptance_length", "fresh_acceptance_length"} <= rows(tmp_path, "eval")[-1].keys()
    before, after = (Checkpoint(x / "final") for x in (out, tmp_path))
    added = after.tensors.keys() - before.tensors.keys()
    assert added == {f"selector.{name}" for name in split_model(merge(task.params).selector)[0]}
    for name in before.tensors:
        np.testing.assert_array_equal(before.read(name), after.read(name), err_msg=name)
    raw = json.loads((tmp_path / "final" / "config.json").read_text())
    assert raw.pop("selector_rank") == 16
    assert raw == json.loads((out / "final" / "config.json").read_text())


def test_a_folder_with_other_weights_is_refused(tmp_path):
    """Other weights than those of its checkpoints."""
    configs = dict(head=dict(num_layers=1), run=dict(optimizer="muon"))
    write_provenance(tmp_path, configs)
    write_provenance(tmp_path, configs | dict(head=dict(num_layers=2)))  # no checkpoint yet
    (tmp_path / "checkpoints").mkdir()
    for changed in (dict(head=dict(num_layers=3)), dict(run=dict(optimizer="adamw"))):
        with pytest.raises(ConfigError, match="another model or optimizer"):
            write_provenance(tmp_path, configs | changed)


KILLED = """
import os, signal, sys
from pathlib import Path
from peagle_jax.training.__main__ import main
from peagle_jax.training.curves import Curves
from tests.waiting import eventually

checkpoint, *argv = sys.argv[1:]
add = Curves.add

def add_and_die(self, row):
    add(self, row)
    if row["step"] > int(Path(checkpoint).name):
        eventually(Path(checkpoint).is_dir)
        os.kill(os.getpid(), signal.SIGKILL)

Curves.add = add_and_die
main(argv)
"""
"""A training that kills itself past the first checkpoint, with a row that no checkpoint covers."""


@pytest.mark.slow
def test_a_killed_run_goes_on_along_the_same_curve(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    texts = [dict(prompt=f"{a} {b} {c}") for a in words for b in words for c in words]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in texts))
    line = (
        f"head --target {folder} --prompts {prompts} --length 48 --max-tokens 24 --step-tokens 192 "
        "--epochs 1 --layers 1 --num-heldout 4 --share embedding unembedding --no-selector"
    ).split()
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main([*line, "--out", str(whole)]) == 0
    steps = [row["step"] for row in rows(whole / "head", "train")]
    assert len(steps) >= 4
    arguments = [str(out / "head" / "checkpoints" / str(steps[0])), *line, "--out", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=LIMIT,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "final").exists()
    assert main([*line, "--out", str(out)]) == 0
    for name in ("train", "eval"):
        resumed, once = rows(out / "head", name), rows(whole / "head", name)
        assert [row["step"] for row in resumed] == [row["step"] for row in once]
        for a, b in zip(resumed, once, strict=True):
            for key in a.keys() - {"tokens_per_s"}:
                np.testing.assert_allclose(a[key], b[key], rtol=1e-6, err_msg=f"{a['step']} {key}")
    weights = [(x / "final" / "model.safetensors").read_bytes() for x in (out, whole)]
    assert weights[0] == weights[1]
    assert json.loads((out / "final" / "config.json").read_text())["trained_length"] == 48
