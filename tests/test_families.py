"""Every family: greedy output equals recomputing everything, across window borders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import memory
from peagle_jax.models.cache import PageCache, RingCache
from peagle_jax.models.layers import Delta
from tests import tiny
from tests.programs import one_bucket
from tests.tiny import causal_attention

pytestmark = pytest.mark.usefixtures("programs_without_controls")

MAX_TOKENS = 37
LENGTHS = (1, 3, 6, 17, 30, 41)  # shorter than a window, and many times longer
LENGTH = 80


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in LENGTHS]


def engine_config(**changes) -> EngineConfig:
    sizes = dict(max_num_seqs=6, max_model_len=LENGTH, page_size=4, prefill_chunk=16)
    return EngineConfig(**(sizes | dict(prefill_rows=2) | changes))


@functools.cache
def target(family: str):
    return tiny.target(**tiny.TARGETS[family])


@functools.cache
def naive(family: str) -> list[list[int]]:
    """Greedy outputs by full forward passes without any cache: the definition."""
    return tiny.greedy(target(family), prompts(), MAX_TOKENS)


def run(engine: Engine) -> list[list[int]]:
    done = one_bucket(engine).generate(prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    engine.scheduler.check_integrity()
    return [completion.tokens for completion in done]


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("method", "num_draft"), [("none", 0), ("eagle3", 3), ("peagle", 5)])
def test_output_is_that_of_the_target_alone(family, method, num_draft):
    head = None if method == "none" else tiny.head(method)
    assert run(Engine(target(family), head, engine_config(num_draft=num_draft))) == naive(family)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("variant", list(reversed(tiny.VARIANTS)))
def test_drafting_for_a_variant_does_not_change_its_output(variant):
    engine = Engine(target(variant), tiny.head(), engine_config(num_draft=4))
    assert run(engine) == naive(variant)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("family", tiny.TARGETS)
@pytest.mark.parametrize("tap_last", [False, True])
def test_rows_that_are_kept_are_those_of_all(family, tap_last):
    model = target(family)
    L = model.config.num_layers
    tokens = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (2, 9)).astype(np.int32)
    where = jnp.broadcast_to(jnp.arange(9), (2, 9))
    taps = (1, L) if tap_last else (1,)

    @jax.jit
    def run(keep):
        return model(tokens, where, [None] * L, causal_attention, taps=taps, keep=keep)[:2]

    whole, tapped = run(None)
    keep = jnp.array([[8, 0, 3], [2, 2, 7]])
    some, tapped_too = run(keep)
    wanted = np.take_along_axis(np.asarray(whole), np.asarray(keep)[..., None], axis=1)
    np.testing.assert_allclose(some, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tapped_too, tapped, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_windows_do_not_see_how_the_prompt_was_cut(family, chunk):
    config = engine_config(num_draft=4, prefill_chunk=chunk, max_num_seqs=3)
    assert run(Engine(target(family), tiny.head(), config)) == naive(family)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["gemma4", "gpt_oss"])
def test_windows_survive_preemption(family):
    config = engine_config(num_draft=3, num_pages=34, max_num_seqs=4)
    engine = Engine(target(family), tiny.head(), config)
    assert run(engine) == naive(family)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_windows_in_the_drafter_change_its_drafts_and_not_the_output():
    head = lambda windows: tiny.head(sliding_windows=windows)
    config = engine_config(num_draft=4)
    sliding = Engine(target("gpt_oss"), head((6, None)), config)
    assert run(sliding) == naive("gpt_oss")


def test_a_ring_holds_a_window_and_the_rows_of_one_call():
    """Its size is the same for a context of a thousand or a million tokens."""
    config = engine_config(num_draft=5)
    rows = config.prefill_chunk + config.lookahead
    assert config.ring_pages(6) * config.page_size < 6 + rows + config.page_size
    longer = engine_config(num_draft=5, max_model_len=2**20, num_pages=2**19)
    assert longer.ring_pages(6) == config.ring_pages(6)
    assert config.ring_pages(10**9) * config.page_size < LENGTH + rows + config.page_size


@pytest.mark.slow
def test_a_cache_in_fp8_is_lossless_too():
    """Its output is that of plain decoding with the same cache, in a quarter of the memory."""
    held = lambda engine: sum(x.nbytes for x in jax.tree.leaves(engine._state.target_cache))
    wide = Engine(target("gpt_oss"), None, engine_config(num_draft=0))
    plain = Engine(target("gpt_oss"), None, engine_config(num_draft=0, kv_cache_dtype="fp8"))
    assert 4 * held(plain) == held(wide)
    config = engine_config(num_draft=3, kv_cache_dtype="fp8")
    outputs = run(plain)
    assert outputs != naive("gpt_oss")
    assert run(Engine(target("gpt_oss"), tiny.head(), config)) == outputs


def test_only_layers_that_see_everything_take_pages():
    config = engine_config(num_draft=5)
    engine = Engine(target("gpt_oss"), tiny.head(), config)
    kinds = [type(layer) for layer in engine._state.target_cache]
    assert kinds == [RingCache, PageCache, RingCache]
    held = sum(x.nbytes for x in jax.tree.leaves(engine._state.target_cache))
    head = engine.drafter_config
    held += sum(x.nbytes for x in jax.tree.leaves(engine._state.drafter_cache))
    sizes = (target("gpt_oss").config, head, engine.config)
    pages = memory.page_bytes(*sizes) * engine.config.total_pages
    assert held == pages + memory.ring_bytes(*sizes)


@pytest.mark.parametrize("field", ["weights", "rows", "norm", "factor"])
def test_a_mixture_refuses_a_delta_that_it_would_not_add(field):
    layer = target("qwen3_moe").layers[0]
    h = jnp.zeros((1, 2, tiny.TARGET.hidden_size))
    with pytest.raises(ValueError, match="adds a dense delta"):
        layer.mlp.after(h, Delta(h[None], **{field: h}), layer.post_norm)
