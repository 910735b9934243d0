"""Where the arrays of several devices lie."""

import jax

from peagle_jax.config import EngineConfig
from peagle_jax.parallel.devices import Devices
from tests import tiny


def test_shapes_of_a_state_lie_where_the_state_does():
    """A program that is compiled for shapes, to keep it on disk, serves the arrays of a later start."""
    devices, heads = Devices(2), dict(num_heads=4, num_kv_heads=2)
    target, head = tiny.target(**heads).config, tiny.head(**heads).config
    config = EngineConfig(max_model_len=32, max_num_seqs=2, num_pages=9, tensor_parallel=2)
    state = devices.init_state(target, head, config)
    shapes = devices.shaped(jax.eval_shape(lambda: devices.init_state(target, head, config)))
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    pairs = list(zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True))
    assert all(shape.sharding == leaf.sharding for shape, leaf in pairs)
    assert any(not shape.sharding.is_fully_replicated for shape, _ in pairs)
