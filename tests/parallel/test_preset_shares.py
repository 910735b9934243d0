"""Which presets 2, 4 and 8 devices can share, and by which number the others are refused."""

import pytest
from flax import nnx

from bench.presets import names, preset
from bench.random_weights import random_head, random_target
from peagle_jax.config import ConfigError
from peagle_jax.devices import Devices
from peagle_jax.parallel.shares import check_shares

COUNTS = (2, 4, 8)
REFUSED = {
    "llama-3.2-1b-fp8": {8: "qkv has blocks of 128"},
    "qwen2.5-0.5b": {4: "14 query heads", 8: "14 query heads"},
    "qwen2.5-0.5b-fp8": {2: "out has blocks of 128", 4: "14 query heads", 8: "14 query heads"},
    "qwen2.5-1.5b": {8: "12 query heads"},
    "qwen2.5-1.5b-fp8": {4: "down has blocks of 128", 8: "12 query heads"},
    "qwen2.5-3b-fp8": {4: "down has blocks of 128", 8: "down has blocks of 128"},
    "qwen2.5-7b": {8: "28 query heads"},
    "qwen2.5-7b-fp8": {8: "28 query heads"},
    "qwen2.5-14b-fp8": {8: "down has blocks of 128"},
    "qwen3-4b-fp8": {8: "down has blocks of 128"},
}


def share(config, model, count: int) -> None:
    """What an engine checks before it places a model: of `model`, a function, the shapes only."""
    check_shares(config, count)
    Devices(count).placed(nnx.eval_shape(model))


@pytest.mark.slow
def test_every_preset_is_shared_or_refused_by_name():
    """With its heads; of layers that are alike the first ones."""
    assert set(names()) > REFUSED.keys()
    for name in names():
        few, refused = preset(name, 6), REFUSED.get(name, {})
        head = few.head("peagle")
        target = lambda few=few: random_target(few.target, few.format, dtype="bfloat16")
        for count in COUNTS:
            if count in refused:
                with pytest.raises(ConfigError, match=refused[count]) as raised:
                    share(few.target, target, count)
                assert raised.value.field == "tensor_parallel"
                continue
            share(few.target, target, count)
            share(head, lambda head=head: random_head(head, dtype="bfloat16"), count)
            for config in (preset(name).target, few.head("eagle3")):
                check_shares(config, count)
