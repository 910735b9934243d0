"""Heads for a tiny checkpoint of every family and format: trained, written, loaded in the engine, lossless."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import EngineConfig, SamplingParams, load
from peagle_jax.checkpoint import load_target
from peagle_jax.training import __main__ as command
from peagle_jax.training.passes import Text, run_target
from tests import tiny
from tests.checkpoint.test_golden_families import GOLDEN, NAMES

S, TAPS = 40, (2, 4, 5)
PRUNED = ("qwen2", "gpt_oss-bf16", "llama-fp8-tensor")
"""Targets of heads with a smaller vocabulary."""


def _texts(count: int, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens = rng.integers(8, vocab_size, (count, S)).astype(np.uint32)
    return dict(tokens=tokens, prompt=np.full(count, 6), length=np.full(count, S))


@cache
def _target(name: str):
    return load_target(GOLDEN / name, dtype="float32")


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_is_the_target_by_its_definition(name):
    """Windows, sinks, scales, experts, biases and quantised weights, on texts longer than a window."""
    target = _target(name)
    text = Text(**{key: jnp.asarray(x) for key, x in _texts(2, target.config.vocab_size).items()})
    positions = jnp.broadcast_to(jnp.arange(S), text.tokens.shape)

    @jax.jit
    def both(target):
        cache = [None] * target.config.num_layers
        tokens = text.tokens.astype(jnp.int32)
        hidden, taps, _ = target(tokens, positions, cache, tiny.causal_attention, taps=TAPS)
        return run_target(target, text, TAPS), taps, target.norm(hidden)

    run, taps, normed = both(target)
    np.testing.assert_allclose(run.taps, taps, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(run.normed, normed, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(3, slow=4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_head_is_trained_written_loaded_and_lossless(name, method, tmp_path):
    folder = GOLDEN / name
    vocab_size = _target(name).config.vocab_size
    for split in ("train", "heldout"):
        np.savez(tmp_path / f"{split}.npz", **_texts(8, vocab_size))
    line = (
        f"drafter --method {method} --target {folder} --text {tmp_path} --out {tmp_path}/head "
        "--steps 3 --batch 4 --layers 1 --depths 3 --num-draft 3 --mask-token-id 1 "
        "--intermediate-size 32 --dtype float32 --warmup 1 --log-every 1 --eval-sequences 4 "
        "--optimizer adamw --learning-rate 1e-2"
    )
    if name in PRUNED:
        line += " --draft-vocab 96"
    assert command.main(line.split()) == 0
    config = EngineConfig(num_draft=3, max_num_seqs=1, max_model_len=64, prefill_chunk=32)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = [[9, 8, 200, 11, 30, 30, 9, 8]]
    drafted = load(folder, tmp_path / "head" / "final", config=config).generate(prompt, params)[0]
    plain = load(folder, method="none", config=config).generate(prompt, params)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.drafted > 0
