"""Options that exclude each other are refused by name, before anything is loaded."""

import pytest

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.device.round_shapes import greedy_shapes, rounds_per_call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(verify_method="token"), "for drawn drafts"),
        (dict(rounds_per_call=2, greedy_rounds=False), "greedy_rounds False"),
        (dict(saved_rings=3, prefix_caching=False), "saved_rings has no effect"),
        (dict(check_replicas=True), "set tensor_parallel above 1"),
        (dict(gather="peers"), "set tensor_parallel above 1"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(options, message):
    for name, value in options.items():
        alone = {name: value}
        needed = dict(draft_sampling="sample") if "verify_method" in alone else {}
        needed |= dict(tensor_parallel=2) if {"check_replicas", "gather"} & alone.keys() else {}
        EngineConfig(**alone, **needed)
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_several_rounds_in_a_call_have_a_program_on_every_platform(platform):
    assert not greedy_shapes(EngineConfig(), platform)
    assert greedy_shapes(EngineConfig(rounds_per_call=2), platform)


def test_light_models_run_several_rounds_in_a_call_at_every_batch_size():
    sizes = lambda **options: {
        shape.size for shape in greedy_shapes(EngineConfig(max_num_seqs=256, **options), "cuda")
    }
    assert max(sizes(greedy_rounds=True)) == 64
    assert max(sizes(rounds_per_call=4)) == max(sizes(rounds_per_call=4, num_draft=0)) == 256


@pytest.mark.parametrize(
    ("platform", "weights_bytes", "options", "rounds"),
    [
        ("cuda", 2**20, dict(), 4),
        ("cuda", 2**20, dict(adaptive="load"), 4),
        ("cuda", 2**20, dict(num_draft=0), 4),
        ("cuda", 2**31, dict(), 1),
        ("cpu", 2**20, dict(), 1),
        ("tpu", 2**20, dict(), 1),
        ("cuda", 2**20, dict(tensor_parallel=2), 1),
        ("cuda", 2**20, dict(draft_sampling="sample"), 4),
        ("cuda", 2**20, dict(greedy_rounds=False), 1),
    ],
)
def test_a_light_model_on_a_gpu_runs_several_rounds_in_a_call(
    platform, weights_bytes, options, rounds
):
    config = EngineConfig(**options)
    assert config.rounds_per_call is None
    assert rounds_per_call(config, platform, weights_bytes) == rounds
