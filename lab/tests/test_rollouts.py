"""`python -m lab rollouts` and `follow`: rows of a step, and the units of a reward."""

import json

import numpy as np
import pytest

from lab.__main__ import main
from lab.follow import advantages_of


@pytest.mark.slow
def test_a_step_is_a_row_for_each_method(folders, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    argv = f"rollouts --model {folders.target} --drafter {folders.peagle} --set small={prompts}"
    fixed = "-K 3 --concurrency 4 --answers 2 --max-tokens 6 --max-model-len 64 --repeats 1"
    argv = [*argv.split(), *fixed.split(), "--no-cache", "--sha", "abc", "--out", str(out)]
    assert main(argv) == 0
    plain, drafted = map(json.loads, out.read_text().splitlines())
    assert (plain["method"], drafted["method"]) == ("none", "peagle")
    assert plain["ratio_to_plain"] == 1.0
    for row in (plain, drafted):
        assert row["prompts"] == 4
        assert row["scored_tokens"] == row["tokens"]
        assert row["largest_difference"] < 1e-4  # float32


def test_advantages_are_relative_to_the_other_answers_of_a_prompt():
    found = advantages_of(np.array([1.0, 3.0, 10.0, 10.0]), 2)
    assert np.allclose(found[2:], 0)
    assert found[0] == -found[1] < 0
