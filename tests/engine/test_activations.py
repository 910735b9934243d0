"""Engines whose products with fp8 weights quantise their activations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import dispatch, formats
from pallas_kernels.device import B200, B300, CPU, H200, RTX5090, V6E
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.models.experts import ExpertLinear
from peagle_jax.models.layers import Linear
from peagle_jax.models.quant import quantize_fp8
from peagle_jax.models.quantized_activations import requantize, with_activations
from tests import programs, tiny
from tests.programs import one_bucket

CONFIG = EngineConfig(
    max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2, num_draft=3
)
MOE = tiny.TARGETS["qwen3_moe"]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield


def in_fp8(**changes):
    """A tiny target whose projections and experts are fp8, with one scale per block."""
    model = tiny.target(**changes)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear | ExpertLinear):
            values, scale = quantize_fp8(np.asarray(module.weight[...]))
            module.weight, module.scale = nnx.Param(values), nnx.Param(scale)
    return model


def run(target, head, **changes) -> list[list[int]]:
    engine = one_bucket(Engine(target, head, replace(CONFIG, **changes)))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in (1, 7, 17, 30)]
    return [done.tokens for done in engine.generate(prompts, SamplingParams(max_tokens=24))]


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("activations", ["fp8", "mxfp8"])
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "experts"])
def test_speculation_keeps_the_text_of_plain_decoding_with_the_same_activations(
    changes, activations
):
    target = in_fp8(**changes)
    plain = run(target, None, activations=activations)
    assert run(target, tiny.head(), activations=activations) == plain
    assert run(target, None) != plain


@pytest.mark.parametrize(
    ("activations", "formats"), [("fp8", "fp8 weights"), ("mxfp8", "fp8 and mxfp4 weights")]
)
def test_a_model_without_quantised_weights_is_refused(activations, formats):
    with pytest.raises(ConfigError, match=f"activations={activations} is for {formats}"):
        Engine(tiny.target(), None, replace(CONFIG, activations=activations))


@pytest.mark.parametrize("chip", [H200, RTX5090, V6E])
def test_mxfp8_is_refused_by_name_on_chips_without_its_products(chip):
    with dispatch.assume(chip), pytest.raises(ConfigError, match=f"B200.* and {chip.name}"):
        with_activations(in_fp8(), replace(CONFIG, activations="mxfp8"))


@pytest.mark.parametrize("chip", [B200, B300, CPU])
def test_mxfp8_weights_are_made_once_and_only_for_the_engine(chip):
    target = in_fp8(**MOE)
    before = [leaf.dtype for leaf in jax.tree.leaves(target)]
    with dispatch.assume(chip):
        made = with_activations(target, replace(CONFIG, activations="mxfp8"))
        again = with_activations(made, replace(CONFIG, activations="mxfp8"))
    kinds = lambda model: {
        formats.kind(module.weight[...], module.scale[...])
        for _, module in nnx.iter_modules(model)
        if isinstance(module, Linear | ExpertLinear)
    }
    assert (kinds(target), kinds(made)) == ({"fp8"}, {"mxfp8"})
    assert [leaf.dtype for leaf in jax.tree.leaves(target)] == before
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True)
    assert all(one is other for one, other in pairs)


def test_mxfp8_weights_are_made_one_at_a_time_and_replace_the_others():
    target = in_fp8(**MOE)
    requantize(target)
    values = {leaf.dtype for leaf in jax.tree.leaves(target) if leaf.dtype.itemsize == 1}
    assert values == {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8)}
    shaped = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shapes = jax.tree.map(shaped, in_fp8(**MOE))
    requantize(shapes)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(jax.tree.map(shaped, target))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))


def test_mxfp4_experts_keep_their_numbers():
    target = tiny.target(**MOE)
    module = target.layers[0].mlp.gate_up
    *outputs, D = module.weight.shape
    rng = np.random.default_rng(0)
    packed = jnp.asarray(rng.integers(0, 256, (*outputs, D // 2)), jnp.uint8)
    codes = jnp.asarray(rng.integers(120, 130, (*outputs, D // 32)), jnp.uint8)
    module.weight, module.scale = nnx.Param(packed), nnx.Param(codes)
    requantize(target)
    found = formats.dequantize(module.weight[...], module.scale[...], jnp.float32)
    assert np.array_equal(found[..., :D], formats.dequantize(packed, codes, jnp.float32))
    assert not found[..., D:].any()


def test_an_engine_leaves_the_activations_of_its_target_alone():
    target = in_fp8(**MOE)
    kinds = lambda model: {
        module.activations
        for _, module in nnx.iter_modules(model)
        if isinstance(module, Linear | ExpertLinear)
    }
    assert kinds(with_activations(target, replace(CONFIG, activations="fp8"))) == {"fp8"}
    assert kinds(target) == {"bf16"}
