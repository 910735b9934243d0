"""Whatever headers a file has: they are refused, or they make exactly the parameters of
the model.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import formats
from peagle_jax.checkpoint import Checkpoint, CheckpointError, target_config
from peagle_jax.checkpoint.layout import FLOATS
from peagle_jax.checkpoint.safetensors import DTYPES
from peagle_jax.checkpoint.tables import target_layout
from peagle_jax.models import build
from tests.checkpoint.test_tables import made

GOLDEN = Path(__file__).parents[1] / "golden"
FUZZ = settings(deadline=None, derandomize=True)
NAMES = (
    "gpt_oss-mxfp4",
    "gpt_oss-bf16",
    "qwen3_moe-bf16",
    "qwen3_moe-fp8",
    "qwen3-fp8-channel",
    "llama-fp8-tensor",
    "mistral",
    "qwen2",
    "gemma4",
)


@cache
def parts(name: str):
    """Config, headers, and the shape of every parameter."""
    config = target_config(GOLDEN / name)
    model = nnx.eval_shape(lambda: build(config, dtype="float32", rngs=nnx.Rngs(0)))
    shapes = {path: x.shape for path, x in nnx.to_flat_state(nnx.state(model))}
    return config, Checkpoint(GOLDEN / name).tensors, shapes


def damaged(tensors: dict, draw) -> dict:
    """Up to three tensors lost, renamed, doubled, or of another shape or dtype."""
    tensors = dict(tensors)
    for _ in range(draw(st.integers(0, 3))):
        info = tensors[draw(st.sampled_from(sorted(tensors)))]
        how = draw(st.sampled_from(["lose", "rename", "double", "dtype", "shape", "scale"]))
        other = draw(st.sampled_from(sorted(tensors)))
        if how in ("lose", "rename"):
            del tensors[info.name]
        if how in ("rename", "double"):
            name = draw(st.sampled_from([other, info.name + "_scale", info.name + ".bias"]))
            tensors[name] = replace(info, name=name)
        elif how == "dtype":
            dtype = draw(st.sampled_from(sorted(DTYPES)))
            tensors[info.name] = replace(info, dtype=DTYPES[dtype])
        elif how == "shape":
            shape = draw(st.sampled_from([(), (1,), tensors[other].shape, info.shape[::-1]]))
            tensors[info.name] = replace(info, shape=shape)
        elif how == "scale" and info.name.endswith(".weight"):
            name = info.name + draw(st.sampled_from(["_scale", "_scale_inv"]))
            shape = draw(st.sampled_from([(), (1,), info.shape[:1], (*info.shape[:1], 1), (2, 2)]))
            tensors[name] = replace(info, name=name, shape=shape, dtype=np.dtype(np.float32))
    return tensors


@pytest.mark.sampled(2, slow=3)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_refused_fills_the_model(name, num_cases):
    config, tensors, shapes = parts(name)
    verdicts = []

    @settings(FUZZ, max_examples=num_cases("damaged checkpoint layouts", 200, least=200))
    @given(st.data())
    def check(data):
        damage = damaged(tensors, data.draw)
        try:
            layout = target_layout(config, damage)
            layout.check(config.family)
        except CheckpointError:
            verdicts.append(False)
            return
        verdicts.append(True)
        arrays = made(layout, damage)
        assert {path for path in arrays if path[-1] != "scale"} == shapes.keys()
        for path, shape in shapes.items():
            scale = arrays.get((*path[:-1], "scale")) if path[-1] == "weight" else None
            if scale is None:
                assert arrays[path].shape == shape
                assert arrays[path].dtype in FLOATS
            else:
                assert formats.logical_shape(arrays[path], scale) == shape
        used = [n for rule in layout.rules for n in rule.names]
        assert sorted([*used, *layout.dropped]) == sorted(damage)

    check()
    # How many depends on the modules that are loaded: hypothesis takes constants from them.
    assert 0 < sum(verdicts) < len(verdicts), "all damage was harmless, or none was"
