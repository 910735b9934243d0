"""Runs of a number of minutes."""

import json
from types import SimpleNamespace

import pytest

from peagle_jax.training import recipe
from peagle_jax.training.budget import Budget
from peagle_jax.training.trainer import schedule
from tests import tiny


def run(folder, *, minutes, decay, seconds_of, start=0):
    """Steps of a simulated run, the time it took, and when the number of steps was fixed."""
    now, step, fixed = 0.0, start, None
    budget = Budget(folder, None, minutes, decay, clock=lambda: now)
    while budget.total is None or step < budget.total:
        now += seconds_of(step - start)
        step += 1
        budget.measure(step, lambda: None)
        if fixed is None and budget.total is not None:
            fixed = step
        assert step < 100_000
    return step, now, fixed


@pytest.mark.parametrize("decay", [0.0, 0.4, 1.0])
def test_a_run_of_minutes_ends_in_time_and_cools_down_at_its_end(tmp_path, decay):
    """The first steps compile; the others become half as fast beside a second run."""
    seconds = lambda step: 20.0 if step < 2 else 0.03 if step < 1500 else 0.06
    steps, took, fixed = run(tmp_path, minutes=5, decay=decay, seconds_of=seconds)
    assert json.loads((tmp_path / "total_steps.json").read_text()) == {"total_steps": steps}
    if decay < 1:  # else the first look at the clock decides
        assert 0.8 * 300 < took < 1.2 * 300
        assert schedule(fixed, steps, warmup=1, decay=decay) == pytest.approx(1, abs=0.25)
    assert schedule(steps - 1, steps, warmup=1, decay=decay) <= 1 / max(1, decay * steps)


def test_a_continued_run_keeps_the_number_of_steps(tmp_path):
    steps, *_ = run(tmp_path, minutes=1, decay=0.5, seconds_of=lambda step: 0.1)
    again, *_ = run(tmp_path, minutes=9, decay=0.5, seconds_of=lambda step: 0.1, start=steps - 7)
    assert again == steps


def test_a_run_of_another_number_of_steps_is_as_long_as_asked(tmp_path):
    assert Budget(tmp_path, 100, None, 0.4).cool_down(30)
    assert [Budget(tmp_path, steps, None, 0.4).total for steps in (100, 400)] == [50, 400]


@pytest.mark.parametrize("steps", [8, 97, 1200, 40_000])
@pytest.mark.parametrize("patience", [1, 3])
def test_a_flat_run_cools_down_before_it_would_anyway(tmp_path, steps, patience):
    """With the recipe's evaluations: the first is as good as those that follow."""
    plan = SimpleNamespace(target=tiny.TARGET, shape=SimpleNamespace(microbatches=1, num_devices=1))
    length = recipe.Length(steps=steps, minutes=None)
    run = recipe.watched(recipe.head_run(plan, tmp_path, length, 0), plan, patience, ())
    budget = Budget(tmp_path, steps, None, run.decay)
    assert budget.cool_down((1 + patience) * run.eval_every)
    assert run.save_every <= run.eval_every
