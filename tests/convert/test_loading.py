"""A converted folder is a model folder: it writes the same text."""

import pytest

from convert.__main__ import main
from peagle_jax.__main__ import main as generate
from peagle_jax.cli.model_folders import embedded
from tests import programs


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
