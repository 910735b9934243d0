"""`peagle-convert plan` refuses every checkpoint that loading refuses."""

import shutil
from pathlib import Path

import pytest

from peagle_jax.checkpoint import CheckpointError, load_head, load_target, target_config
from tests.checkpoint import test_golden_targets as targets
from tests.checkpoint import test_head_layouts as layouts
from tests.checkpoint import test_heads_refused as heads
from tests.convert.conftest import GOLDEN


def broken_heads() -> dict[str, tuple]:
    """name -> (golden head, change of its config and tensors)."""
    found = {}
    for module in (heads, layouts):
        for name, (head, change, _) in module.REFUSED.items():
            found[f"{module.__name__.split('.')[-1]}: {name}"] = (module, head, change)
    return found


HEADS = broken_heads()
TARGETS = {name: case for name, case in targets.REFUSED.items() if case[-1] is not None}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_loading_refuses_is_refused_by_plan(case, cli, tmp_path):
    module, name, change = HEADS[case]
    folder = module.write_head(tmp_path / "head", *change(*module.parts(name)))
    with pytest.raises(CheckpointError):
        load_head(folder, target_config(GOLDEN / "qwen3"), dtype="float32")
    check_refused(cli, folder, "--target", GOLDEN / "qwen3")


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_loading_refuses_is_refused_by_plan(case, cli, tmp_path):
    config, with_biases, _ = TARGETS[case]
    biases = targets.random_biases("llama") if with_biases else {}
    targets.copy_with("llama", tmp_path, config, biases)
    with pytest.raises(CheckpointError):
        load_target(tmp_path, dtype="float32")
    check_refused(cli, tmp_path)


def check_refused(cli, folder: Path, *options) -> None:
    """`plan` and `convert` refuse in one line, or list leftovers and holes; nothing is written."""
    code, _, err = cli("plan", folder, *options)
    assert code in (1, 2)
    assert code == 1 or err.count("\n") == 1
    assert cli("convert", folder, folder.parent / "out", *options)[0] == code
    assert not (folder.parent / "out").exists()


def test_a_head_whose_target_is_refused_is_refused(cli, tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "target")
    targets.copy_with("llama", tmp_path / "target", {"rope_theta": -1.0}, {})
    check_refused(cli, GOLDEN / "peagle-1", "--target", tmp_path / "target")
