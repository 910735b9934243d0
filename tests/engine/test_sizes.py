"""Sizes that no memory would make possible."""

from dataclasses import replace

import pytest

from peagle_jax import Engine
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.device.sizes import check_sizes
from tests import tiny

TARGET = replace(tiny.TARGET, max_position=5000)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        (dict(max_model_len=1_000_000_000), 5000),
        (dict(max_model_len=5001), 5000),
        (dict(prefill_chunk=1_000_000_000), 4096),
        (dict(prefill_chunk=5001, max_model_len=5000), 5000),
        (dict(max_logprobs=tiny.TARGET.vocab_size + 1), tiny.TARGET.vocab_size),
    ],
)
def test_what_the_model_does_not_have_is_refused_with_the_largest_size(sizes, most):
    with pytest.raises(ConfigError, match=f"^{next(iter(sizes))}=.*at most {most} is possible"):
        check_sizes(TARGET, EngineConfig(**sizes))
    check_sizes(TARGET, EngineConfig(**(sizes | {next(iter(sizes)): most})))


@pytest.mark.parametrize("given", [33, 100, 129])
def test_more_drafts_than_any_head_makes_are_refused(given):
    with pytest.raises(ConfigError, match=rf"^num_draft={given} \(.*\) must lie between 0 and 32"):
        EngineConfig(num_draft=given)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_draft="7"),
        dict(num_pages="20"),
        dict(prefill_chunk=1.5),
        dict(max_num_seqs="4"),
        dict(batch_sizes=8),
        dict(batch_sizes=("8",)),
        dict(dtype="int8"),
    ],
)
def test_sizes_of_another_type_are_refused_by_name(sizes):
    (name,) = sizes
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**sizes)


@pytest.mark.parametrize("sizes", [(1, 2), (4, 2, 1), (2, 2, 4), (0, 4), (1, 8)])
def test_batch_sizes_ascend_to_the_number_of_slots(sizes):
    with pytest.raises(ConfigError, match="must ascend, and end with max_num_seqs=4"):
        EngineConfig(max_num_seqs=4, batch_sizes=sizes)


def test_the_default_length_is_cut_to_a_small_model():
    target = tiny.target(max_position=64)
    engine = Engine(target, None, EngineConfig(max_num_seqs=1))
    assert engine.config.max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len=1000000000 is above the 64 positions"):
        Engine(target, None, EngineConfig(max_model_len=1_000_000_000))


@pytest.mark.parametrize("name", ["max_num_seqs", "prefill_rows"])
def test_what_no_machine_holds_is_refused_before_it_is_allocated(name):
    config = EngineConfig(max_model_len=64, **{name: 1_000_000_000})
    with pytest.raises(ConfigError, match="not enough memory"):
        Engine(tiny.target(), tiny.head(), config)
