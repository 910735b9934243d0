"""`python -m lab humaneval`: right programs pass, wrong ones do not, and the counts follow."""

import itertools
import json
from types import SimpleNamespace

import pytest

from bench.rows import DATA
from lab import humaneval
from lab.__main__ import main
from lab.humaneval import STOP, Problem, judged, pass_at, problems, repeated_share
from lab.sandbox import run

ROWS = [json.loads(line) for line in (DATA / "HumanEval.jsonl").read_text().splitlines()]
PROBLEMS = problems()


def solution(row: dict, prompt: str) -> str:
    """The released solution as a continuation of the stripped prompt."""
    return (row["prompt"] + row["canonical_solution"]).removeprefix(prompt)


@pytest.mark.sampled(4, slow=12)
@pytest.mark.parametrize("i", range(0, 164, 4))
def test_released_solutions_pass_and_stubs_fail(i):
    row, problem = ROWS[i], PROBLEMS[i]
    text = solution(row, problem.prompt)
    assert run(problem.program(text), seconds=30).status == "passed"
    assert run(problem.program("\n    return NotImplemented\n")).status != "passed"


def test_no_released_solution_is_cut_by_a_stop_string():
    bodies = [solution(row, problem.prompt) for row, problem in zip(ROWS, PROBLEMS, strict=True)]
    assert not [body for body in bodies for stop in STOP if stop in body.rstrip()]


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (6, 5, 2)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_sample(n, c, k):
    choices = list(itertools.combinations(range(n), k))
    expected = sum(min(choice) < c for choice in choices) / len(choices)
    assert pass_at(k, n, c) == pytest.approx(expected)


def test_repeated_grams_are_counted_within_a_text():
    assert repeated_share([list(range(20)), list(range(20))]) == 0.0
    assert repeated_share([[1] * 11]) == 3 / 4
    assert repeated_share([[1, 2]]) == 0.0


def test_samples_of_a_problem_are_counted_together():
    pair = PROBLEMS[:2]
    right = [solution(row, one.prompt) for row, one in zip(ROWS, pair, strict=False)]
    texts = [right[0], "\n    return None", "", "\n    return 1 +"]
    done = [SimpleNamespace(text=text, tokens=[1, 2]) for text in texts]
    row = judged(pair, done, 2)
    assert row["pass@1"] == 0.25
    assert row["solved"] == 1
    assert row["empty"] == 0.25
    assert row["outcomes"] == {"passed": 1, "failed": 3}
    assert row["errors"]["SyntaxError"] == 1
    assert "pass@10" not in row


@pytest.mark.slow
def test_the_command_writes_a_row(folders, tmp_path, capsys, monkeypatch):
    small = [
        Problem(f"small/{i}", "def f():", "def check(f): assert f() == 1", "f") for i in (1, 2)
    ]
    monkeypatch.setattr(humaneval, "problems", lambda limit: small)
    out = tmp_path / "rows.jsonl"
    fixed = "-K 3 --samples 2 --max-tokens 8 --max-model-len 128 --no-cache --sha abc"
    argv = ["humaneval", "--model", folders.target, "--drafter", folders.peagle, "--out", out]
    argv += fixed.split()
    assert main(list(map(str, argv))) == 0
    assert "pass@1" in capsys.readouterr().out
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["problems"] == row["samples"] == 2
    assert row["pass@1"] == 0.0
    assert sum(row["outcomes"].values()) == 4


def test_greedy_samples_are_taken_once(capsys):
    assert main(["humaneval", "--temperature", "0"]) == 2
    assert "--samples 1" in capsys.readouterr().err
