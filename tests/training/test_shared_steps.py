"""Steps on several devices, and from states that the target left on disk."""

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from peagle_jax.cli.model_folders import embedded
from peagle_jax.config import ConfigError
from peagle_jax.training import drafter, states, trainer
from peagle_jax.training.__main__ import main
from peagle_jax.training.trainer import fit
from tests import tiny
from tests.training import small

TWO_LAYERS, HEAD = dict(num_layers=2), dataclasses.replace(tiny.HEAD, num_layers=1)
CLOSE = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def trained(texts: Path, target, **run_options) -> dict:
    """Weights of a head after three steps of two pieces."""
    options = small.head_options(texts=texts, batch=4, anchors=20)
    run_options = dict(steps=3, eval_every=3, save_every=1) | run_options
    run = small.run_config(texts / "run", **run_options)
    return fit(drafter.make_task(HEAD, target, options, run)[0], run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """From one device, whose target runs in each step."""
    texts = tmp_path_factory.mktemp("alone")
    small.save_texts(texts, tiny.TARGET.vocab_size)
    return trained(texts, tiny.target(**TWO_LAYERS), microbatches=2)


def test_two_devices_take_the_pieces_that_one_takes_in_turn(alone, tmp_path, monkeypatch):
    small.save_texts(tmp_path, tiny.TARGET.vocab_size)
    with monkeypatch.context() as killed:
        killed.setattr(trainer._Record, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained(tmp_path, tiny.target(**TWO_LAYERS), num_devices=2, eval_every=2)
    shared = trained(tmp_path, tiny.target(**TWO_LAYERS), num_devices=2)
    assert all(len(leaf.devices()) == 1 for leaf in shared.values())
    jax.tree.map(CLOSE, alone, shared)


def test_absent_devices_are_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("")
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(["head", "--target", str(embedded("target")), *options, "--num-devices", "64"])
    assert "--num-devices 64: this machine shows 8 of kind cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_head_learns_the_same_from_states_on_disk(alone, tmp_path, monkeypatch):
    small.save_texts(tmp_path, tiny.TARGET.vocab_size)
    target = tiny.target(**TWO_LAYERS)
    write = partial(states.write_states, target, HEAD.taps, tmp_path)
    with pytest.raises(ConfigError, match=r"the states take .* GB"):
        write(most_gb=1e-6)
    with monkeypatch.context() as killed:
        killed.setattr(states, "_ROW_TOKENS", 80)
        killed.setattr(states, "write_whole", lambda path, text: (path.write_text(text), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            write(most_gb=1)
    write(most_gb=1)
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: full)
    write(most_gb=1)  # nothing is left to write
    monkeypatch.setattr(type(target), "__call__", None)  # the target does not run again
    found = trained(tmp_path, states.without_layers(target, 1), microbatches=2)
    jax.tree.map(CLOSE, alone, found)
