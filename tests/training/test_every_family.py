"""Heads for a tiny checkpoint of every family and format: trained, written, loaded, lossless."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import EngineConfig, SamplingParams, load
from peagle_jax.checkpoint import load_target, save_head
from peagle_jax.training import drafter, recipe
from peagle_jax.training.passes import Text, run_target
from peagle_jax.training.trainer import fit
from tests import tiny
from tests.checkpoint.test_golden_families import GOLDEN, NAMES
from tests.training.small import head_options, run_config, save_texts

pytestmark = pytest.mark.usefixtures("programs_without_controls")

S, TAPS = 40, (2, 4, 5)
PRUNED = ("qwen2", "gpt_oss-bf16", "llama-fp8-tensor")
"""Targets of heads with a smaller vocabulary."""


@cache
def _target(name: str):
    return load_target(GOLDEN / name, dtype="float32")


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_is_the_target_by_its_definition(name):
    """Windows, sinks, experts, biases and quantised weights, on texts longer than a window."""
    target = _target(name)
    tokens = np.random.default_rng(3).integers(8, target.config.vocab_size, (2, S))
    text = Text(jnp.asarray(tokens, jnp.int32), jnp.full(2, 6), jnp.full(2, S))
    positions = jnp.broadcast_to(jnp.arange(S), text.tokens.shape)

    @jax.jit
    def both(target):
        cache = [None] * target.config.num_layers
        hidden, taps, _ = target(text.tokens, positions, cache, tiny.causal_attention, taps=TAPS)
        return run_target(target, text, TAPS), taps, target.norm(hidden)

    run, taps, normed = both(target)
    np.testing.assert_allclose(run.taps, taps, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(run.normed, normed, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(0, slow=7)
@pytest.mark.parametrize("name", sorted(NAMES, key="llama".__ne__))  # the quickest to compile first
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_head_is_trained_written_loaded_and_lossless(name, method, tmp_path):
    folder, target = GOLDEN / name, _target(name)
    save_texts(tmp_path, target.config.vocab_size)
    draft_vocab = 96 if name in PRUNED else None
    head = recipe.head_config(
        target.config, method=method, layers=1, mask_token_id=1, draft_vocab=draft_vocab
    )
    head = replace(head, intermediate_size=32, trained_num_draft=3)
    options = head_options(texts=tmp_path, batch=4, num_depths=3, eval_sequences=4)
    run = run_config(tmp_path / "run", 3, optimizer="adamw", learning_rate=1e-2)
    task, merge = drafter.make_task(head, target, options, run)
    trained = merge(fit(task, run))
    save_head(trained, tmp_path / "head", max_position=target.config.max_position)
    config = EngineConfig(num_draft=3, max_num_seqs=1, max_model_len=64, prefill_chunk=32)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = [[9, 8, 200, 11, 30, 30, 9, 8]]
    drafted = load(folder, tmp_path / "head", config=config).generate(prompt, params)[0]
    assert [drafted.tokens] == tiny.greedy(target, prompt, 12)
    assert drafted.drafted > 0
