"""A converted folder is a model folder: it loads to the same weights and writes the same text."""

import jax
import numpy as np
import pytest
from flax import nnx

from convert.__main__ import main
from peagle_jax.__main__ import main as generate
from peagle_jax.cli.model_folders import embedded
from tests import programs


def same_weights(first: nnx.Module, second: nnx.Module) -> bool:
    pairs = [jax.tree.leaves_with_path(nnx.state(model)) for model in (first, second)]
    paths = [[path for path, _ in leaves] for leaves in pairs]
    return paths[0] == paths[1] and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for (_, a), (_, b) in zip(*pairs, strict=True)
    )


@pytest.mark.slow
def test_text_is_generated_from_converted_folders(tmp_path, capsys):
    target, head = str(tmp_path / "target"), str(tmp_path / "head")
    assert main(["convert", str(embedded("target")), target]) == 0
    assert main(["convert", str(embedded("peagle")), head, "--target", target]) == 0
    capsys.readouterr()
    options = ["def add(a, b):", "--max-tokens", "12", "-K", "3", "--no-cache"]
    texts = []
    with programs.shared():
        for where in ([], ["--model", target, "--drafter", head]):
            assert generate([*options, *where]) == 0
            texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def add(a, b):")
