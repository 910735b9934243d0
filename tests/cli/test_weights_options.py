"""`--quantization` and `--taps`: how the weights are read."""

import numpy as np
import pytest

from tests import adapters, tiny
from tests.cli.test_generate import PROMPT, SHORT


@pytest.mark.slow
def test_quantised_drafting_writes_what_the_quantised_target_writes(generate, folders):
    outs = {}
    for method in ("none", "peagle"):
        code, outs[method], _ = generate(
            PROMPT, *folders.options(method), *SHORT, "--quantization", "fp8"
        )
        assert code == 0
    assert outs["none"] == outs["peagle"]
    assert outs["none"] != generate(PROMPT, *folders.options("none"), *SHORT)[1]


def test_taps_reach_the_head(generate, folders):
    layers = tiny.TARGET.num_layers
    code, _, err = generate(PROMPT, *folders.options(), *SHORT, "--taps", f"0,1,{layers + 5}")
    assert code == 2
    assert str(layers + 5) in err
    assert generate(PROMPT, *folders.options(), *SHORT, "--taps", "0,1,2")[0] == 0


def test_taps_must_be_numbers(generate, folders):
    code, _, err = generate(PROMPT, *folders.options(), *SHORT, "--taps", "1,x")
    assert code == 2
    assert "must be layer numbers" in err


def test_a_merged_adapter_writes_what_the_merged_folder_writes(generate, folders, tmp_path):
    products = adapters.save_adapter(tmp_path / "lora", adapters.modules_of(folders.target))
    deltas = {name: np.float32(0.5) * product for name, product in products.items()}
    adapters.save_merged(folders.target, tmp_path / "merged", deltas)
    options = folders.options("none")
    code, out, _ = generate(PROMPT, *options, *SHORT, "--lora", tmp_path / "lora")
    assert code == 0
    by_hand = ["--model", tmp_path / "merged", *options[2:]]
    assert out == generate(PROMPT, *by_hand, *SHORT)[1]
    assert out != generate(PROMPT, *options, *SHORT)[1]
    drafted = generate(PROMPT, *folders.options(), *SHORT, "--lora", tmp_path / "lora")[1]
    assert out == drafted
