"""`--quantization` and `--taps`: how the weights are read."""

import pytest

from tests import tiny
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
