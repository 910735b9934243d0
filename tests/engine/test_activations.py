"""Engines whose products with fp8 weights quantise their activations."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.models.experts import ExpertLinear
from peagle_jax.models.layers import Linear
from peagle_jax.models.quant import quantize_fp8
from peagle_jax.models.quantized_activations import with_activations
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

CONFIG = EngineConfig(
    max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2, num_draft=3
)
MOE = tiny.TARGETS["qwen3_moe"]


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
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "experts"])
def test_speculation_keeps_the_text_of_plain_decoding_with_the_same_activations(changes):
    target = in_fp8(**changes)
    plain = run(target, None, activations="fp8")
    assert run(target, tiny.head(), activations="fp8") == plain
    assert run(target, None) != plain


def test_a_model_without_quantised_weights_is_refused():
    with pytest.raises(ConfigError, match="activations=fp8 is for fp8 weights"):
        Engine(tiny.target(), None, replace(CONFIG, activations="fp8"))


def test_an_engine_leaves_the_activations_of_its_target_alone():
    target = in_fp8(**MOE)
    kinds = lambda model: {
        module.activations
        for _, module in nnx.iter_modules(model)
        if isinstance(module, Linear | ExpertLinear)
    }
    assert kinds(with_activations(target, replace(CONFIG, activations="fp8"))) == {"fp8"}
    assert kinds(target) == {"bf16"}
