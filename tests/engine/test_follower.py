"""A second engine that repeats the device calls of the first one holds equal caches."""

import jax
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device.device_calls import Compile, CopyRings, Run, WriteControls
from tests import tiny
from tests.programs import one_bucket

CONFIG = EngineConfig(
    num_draft=3, max_num_seqs=2, max_model_len=64, page_size=4, num_pages=20, prefill_chunk=8,
    saved_rings=2,
)  # fmt: skip
WINDOWS = tiny.FAMILIES["mistral"] | dict(num_layers=1, sliding_windows=(6,))


@pytest.fixture(scope="module")
def engines(shared_programs) -> tuple[Engine, Engine]:
    target, head = tiny.target(**WINDOWS), tiny.head(num_layers=1, num_taps=1, taps=(0,))
    return Engine(target, head, CONFIG), Engine(target, head, CONFIG)


@pytest.mark.slow
def test_calls_repeated_in_order_make_equal_state(engines):
    """Requests of mixed kinds, with a preemption, cached prefixes and saved rings."""
    leader, other = engines
    calls = []
    leader.programs.on_call = calls.append
    one_bucket(leader)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 100, size).tolist() for size in (21, 3, 30)]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5),
        SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={7: -3.0}),
    ]
    for _ in range(2):
        leader.generate(prompts, params)
    follower = other.follower()
    for call in calls:
        follower.perform(call)
    kinds = {type(call) for call in calls}
    assert kinds == {Run, WriteControls, CopyRings, Compile}
    assert any(isinstance(call, Run) and call.plan is None for call in calls)
    pairs = zip(jax.tree.leaves(leader._state), jax.tree.leaves(follower.state), strict=True)
    for mine, its in pairs:
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))
