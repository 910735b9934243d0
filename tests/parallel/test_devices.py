"""Where the arrays of several devices lie, and what their programs consist of."""

import jax
import jax.numpy as jnp
import pytest

from peagle_jax import Engine
from peagle_jax.config import EngineConfig, ExpertsConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.program import GreedyRound, Prefill, Round
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.prefill_shapes import PrefillShape
from peagle_jax.parallel import partition
from tests import tiny


@pytest.mark.parametrize("peers", [False, True])
def test_shapes_of_a_state_lie_where_the_state_does(peers):
    """A program that is compiled for shapes serves the arrays of a later start."""
    devices, heads = Devices(2, peers=peers), dict(num_heads=4, num_kv_heads=2)
    target, head = tiny.target(**heads).config, tiny.head(**heads).config
    config = EngineConfig(max_model_len=32, max_num_seqs=2, num_pages=9, tensor_parallel=2)
    state = devices.init_state(target, head, config)
    shapes = devices.state_shape(target, head, config)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    pairs = list(zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True))
    assert all(shape.sharding == leaf.sharding for shape, leaf in pairs)
    assert any(not shape.sharding.is_fully_replicated for shape, _ in pairs)


def test_one_device_has_the_programs_and_weights_of_no_partition():
    devices, model = Devices(1), tiny.target()
    step = lambda *operands: operands
    assert devices.program(step) is step
    assert devices.placed(model) is model
    weights = jax.tree.leaves(model)
    assert all(a is b for a, b in zip(devices.take_weights(weights), weights, strict=True))
    assert partition.size() == 1
    x = jnp.ones((2, 3))
    assert partition.total(x) is x


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize(
    "key", [GreedyRound(RoundShape(2, 3)), Round(RoundShape(2, 3)), Prefill(PrefillShape(1, 128))]
)
def test_programs_exchange_arrays_by_gathers_alone(key):
    """The order of additions of an all-reduce depends on the size of its message."""
    heads = dict(num_heads=4, num_kv_heads=2)
    target = tiny.target(family="qwen3_moe", experts=ExpertsConfig(num_experts=4, top_k=2), **heads)
    sizes = dict(num_draft=3, max_num_seqs=2, max_model_len=32, page_size=4, greedy_rounds=True)
    head = tiny.head("selector", **heads, draft_vocab_size=50)
    engine = Engine(target, head, EngineConfig(tensor_parallel=2, **sizes))
    programs = engine.programs
    lower = key.lower(programs._functions, engine._state)
    code = lower(*programs._operands(key, engine._state)).as_text()
    assert "all_gather" in code
    assert "all_reduce" not in code
    assert "reduce_scatter" not in code
    assert "all_to_all" not in code
