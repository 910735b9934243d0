"""Several devices share the texts of a step."""

from functools import partial

import jax
import numpy as np
import pytest

from peagle_jax.cli.model_folders import embedded
from peagle_jax.training import drafter
from peagle_jax.training.__main__ import main
from peagle_jax.training.trainer import fit
from tests import tiny
from tests.training import small


def test_two_devices_take_the_pieces_that_one_takes_in_turn(tmp_path):
    small.save_texts(tmp_path, tiny.TARGET.vocab_size)
    target = tiny.target()
    options = small.head_options(texts=tmp_path, batch=4, anchors=20)

    def trained(name: str, **pieces) -> dict:
        run = small.run_config(tmp_path / name, steps=3, eval_every=3, save_every=3, **pieces)
        return fit(drafter.make_task(tiny.HEAD, target, options, run)[0], run)

    alone = trained("alone", microbatches=2)
    shared = trained("shared", num_devices=2)
    assert all(len(leaf.devices()) == 1 for leaf in shared.values())
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, alone, shared)


def test_absent_devices_are_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("")
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(["head", "--target", str(embedded("target")), *options, "--num-devices", "64"])
    assert "--num-devices 64: this machine shows 8 of kind cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
