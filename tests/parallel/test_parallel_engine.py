"""Engines over several devices: the text depends on no drafts, batches, chunks or prefixes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from bench.random_weights import random_target
from pallas_kernels.peer_gather import mailbox
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.config import ConfigError, ExpertsConfig, GlobalAttention
from peagle_jax.engine.device.program import GreedyRound
from peagle_jax.rope_config import RopeConfig
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

EXPERTS = ExpertsConfig(num_experts=8, top_k=2)
TWO_LAYERS = dict(num_layers=2)
FAMILIES = {
    "qwen3": TWO_LAYERS,
    "llama": tiny.VARIANTS["llama with biases"] | TWO_LAYERS,
    "mistral": tiny.FAMILIES["mistral"],
    "qwen2": tiny.FAMILIES["qwen2"],
    "qwen3_moe": dict(family="qwen3_moe", experts=EXPERTS, **TWO_LAYERS),
    "dense layers": dict(
        family="qwen3_moe",
        experts=ExpertsConfig(num_experts=8, top_k=2, dense_layers=(0, 2), dense_size=40),
    ),
    "gpt_oss": tiny.FAMILIES["gpt_oss"] | dict(experts=EXPERTS),
    "gemma4": tiny.FAMILIES["gemma4"]
    | dict(
        global_attention=GlobalAttention(
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(theta=1e6, rotary_share=0.25),
            shared_kv=True,
        )
    ),
}
"""Families whose heads and experts 8 devices can share; a key head is then on two or four of them.
"""
HEADS = dict(num_heads=8, num_kv_heads=4)
LENGTHS = (1, 7, 17, 30, 5)
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in LENGTHS]


def engine_config(count: int, **changes) -> EngineConfig:
    sizes = dict(max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2)
    return EngineConfig(tensor_parallel=count, **(sizes | changes))


@functools.cache
def target(family: str):
    return tiny.target(**(HEADS | FAMILIES[family]))


@functools.cache
def head(method: str):
    layers = {} if method in ("dflash2", "dspark") else dict(num_layers=1)
    return tiny.head(method, **HEADS, **layers)


def texts(engine: Engine, **params) -> list[list[int]]:
    done = one_bucket(engine).generate(prompts(), SamplingParams(max_tokens=MAX_TOKENS, **params))
    engine.scheduler.check_integrity()
    return [completion.tokens for completion in done]


def check_lossless(count: int, model, wanted: list[list[int]], **changes) -> None:
    """Compares drafts, other chunks and batches, preemption and prefixes with plain texts."""
    config = engine_config(
        count,
        num_draft=3,
        prefill_chunk=5,
        prefill_rows=1,
        num_pages=17,
        check_replicas=True,
        **changes,
    )
    drafting = Engine(model, head("peagle"), config)
    assert texts(drafting) == wanted
    assert drafting.scheduler.num_preemptions > 0
    assert texts(drafting) == wanted  # with cached prefixes
    config = engine_config(count, num_draft=2, max_num_seqs=1, prefix_caching=False, **changes)
    assert texts(Engine(model, head("eagle3"), config)) == wanted


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("method", ["peagle", "dflash2", "dspark"])
def test_two_devices_write_the_text_of_one(method):
    """In float32 the parts of two devices round little apart: these texts are equal."""
    model, told = target("qwen3_moe"), SamplingParams(max_tokens=MAX_TOKENS)
    run = lambda engine: [
        (one.tokens, one.accepted_per_position) for one in engine.generate(prompts(), told)
    ]
    plain = texts(Engine(model, None, engine_config(1, num_draft=0)))
    one = run(one_bucket(Engine(model, head(method), engine_config(1, num_draft=3))))
    assert [tokens for tokens, _ in one] == plain
    two = Engine(model, head(method), engine_config(2, num_draft=3, check_replicas=True))
    assert run(one_bucket(two)) == one
    held = [leaf.sharding for leaf in jax.tree.leaves(two._state.target_cache)]
    assert all(isinstance(sharding, NamedSharding) for sharding in held)
    assert not any(sharding.is_fully_replicated for sharding in held)


@pytest.mark.slow
def test_messages_to_peers_have_one_order_on_all_devices():
    """Also the messages of the branches that calls with sampled requests have."""
    model, asked = target("qwen3_moe"), dict(temperature=1, seed=3)
    config = engine_config(2, num_draft=3, check_replicas=True)
    wanted = texts(Engine(model, head("peagle"), config), **asked)
    engine = Engine(model, head("peagle"), dataclasses.replace(config, gather="peers"))
    assert texts(engine, **asked) == wanted
    first, second = np.asarray(engine._state.links)[:, mailbox.COUNTERS :]
    assert (first == second).all()
    assert first[0] > 100
    assert (first[1:] <= first[0]).all()  # thread block 0 has a part of every message
    engine.release_cache()
    engine.restore_cache()
    assert (np.asarray(engine._state.links)[0, mailbox.COUNTERS :] == first).all()
    assert texts(engine, **asked) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["library", "peers"])
def test_several_rounds_in_a_call_send_the_messages_of_single_ones(gather):
    """The loop hands the table of messages from round to round."""
    model = target("qwen3_moe")
    wanted = texts(Engine(model, None, engine_config(1, num_draft=0)))
    sizes = dict(num_draft=3, num_pages=24, check_replicas=True, gather=gather)
    engine = Engine(model, head("peagle"), engine_config(2, rounds_per_call=3, **sizes))
    assert texts(engine) == wanted
    assert texts(engine) == wanted  # with cached prefixes
    calls = [key for key in engine.programs.rounds_of_any if isinstance(key, GreedyRound)]
    assert calls
    assert engine.config.repeat == 3
    if gather == "peers":
        sent = np.asarray(engine._state.links)[:, mailbox.COUNTERS :]
        assert (sent[0] == sent[1]).all()
        assert sent[0, 0] > 100


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_lossless_on_any_number_of_devices(family, count):
    wanted = texts(Engine(target(family), None, engine_config(1, num_draft=0)))
    check_lossless(count, target(family), wanted)


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("family", "form"), [("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_models_are_lossless_too(family, form, count, dtype):
    sizes = dict(hidden_size=64, head_dim=128, intermediate_size=512, **tiny.ONE_LAYER)
    config = tiny.target(**(HEADS | FAMILIES[family] | sizes | dict(sliding_windows=None))).config
    quantised = random_target(config, form, dtype=dtype)
    plain = texts(Engine(quantised, None, engine_config(count, num_draft=0, dtype=dtype)))
    if dtype == "float32":
        one = engine_config(1, num_draft=0, dtype=dtype)
        assert texts(Engine(quantised, None, one)) == plain
    drafter = tiny.head(
        "peagle",
        dtype=dtype,
        hidden_size=64,
        target_hidden_size=64,
        **tiny.HEAD_OF_ONE_LAYER,
    )
    config = engine_config(count, num_draft=3, prefill_chunk=5, dtype=dtype)
    assert texts(Engine(quantised, drafter, config)) == plain


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("form", ["experts", "dense"])
def test_quantised_activations_are_lossless_too(form, count):
    """A device has whole groups of 128 columns: rows are quantised as on one device."""
    sizes = dict(hidden_size=128, head_dim=128, intermediate_size=512, **tiny.ONE_LAYER)
    family = FAMILIES["qwen3_moe" if form == "experts" else "qwen3"]
    model = random_target(tiny.target(**(HEADS | family | sizes)).config, "fp8", dtype="float32")
    drafter = tiny.head(hidden_size=128, target_hidden_size=128, **tiny.HEAD_OF_ONE_LAYER)
    engine = lambda n, **changes: Engine(
        model, drafter, engine_config(n, activations="fp8", **changes)
    )
    plain = Engine(model, None, engine_config(count, num_draft=0, activations="fp8"))
    wanted = texts(plain)
    assert texts(engine(1, num_draft=3)) == wanted
    assert texts(engine(count, num_draft=3, prefill_chunk=5, check_replicas=True)) == wanted
    as_they_are = Engine(model, None, engine_config(count, num_draft=0))
    asked = SamplingParams(max_tokens=2, logprobs=1)
    made = [one.generate(prompts()[:1], asked)[0].logprobs for one in (plain, as_they_are)]
    assert made[0] != made[1]  # the activations were quantised


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_cache_in_fp8_is_lossless_too(family):
    """Pages, and rings of windows."""
    model, cache = target(family), dict(kv_cache_dtype="fp8")
    wanted = texts(Engine(model, None, engine_config(2, num_draft=0, **cache)))
    assert texts(Engine(model, None, engine_config(1, num_draft=0, **cache))) == wanted
    check_lossless(2, model, wanted, **cache)


@pytest.mark.slow
def test_a_device_that_computes_something_else_is_found():
    engine = one_bucket(
        Engine(target("qwen3"), None, engine_config(2, num_draft=0, check_replicas=True))
    )
    engine.generate(prompts()[:1], SamplingParams(max_tokens=3))
    seeds = engine._state.params.seed
    copies = [shard.data for shard in seeds.addressable_shards]
    copies[1] = jax.device_put(copies[1].at[-1, 1].set(5), copies[1].device)
    broken = jax.make_array_from_single_device_arrays(seeds.shape, seeds.sharding, copies)
    params = engine._state.params._replace(seed=broken)
    engine._state = dataclasses.replace(engine._state, params=params)
    with pytest.raises(RuntimeError, match="disagree"):
        engine.generate(prompts()[:2], SamplingParams(max_tokens=20))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="9 devices are asked for, and there are 8 of cpu"):
        Engine(target("qwen3"), None, engine_config(9))
