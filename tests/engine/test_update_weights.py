"""Weights that change while the engine lives: texts are those of an engine made from them, and what
does not fit changes nothing.
"""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.errors import NotReady
from tests import tiny
from tests.eager import moved_by_jax
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
SHARED = np.random.default_rng(7).integers(2, 128, 17).tolist()
PROMPTS = [[*SHARED, 5], [*SHARED, 9, 3], [4, 8, 2]]
"""Two with one beginning, which the prefix cache shares."""
CONFIG = EngineConfig(
    num_draft=3, max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2
)
OLD, NEW = 0, 5  # seeds


def small_target(seed: int):
    return tiny.target(seed, **tiny.ONE_LAYER)


def small_head(method: str = "peagle", seed: int = 1):
    return tiny.head(method, seed, **tiny.HEAD_OF_ONE_LAYER)


def make_engine(target, head=None) -> Engine:
    return one_bucket(Engine(target, head, CONFIG))


@pytest.fixture
def engine(programs_without_controls) -> Engine:
    return make_engine(small_target(OLD), small_head())


def texts(engine: Engine, prompts=PROMPTS) -> list[list[int]]:
    return [done.tokens for done in engine.generate(prompts, GREEDY)]


def natural(seed: int, prompts=PROMPTS) -> list[list[int]]:
    """The texts of one version of the target, without drafts."""
    return texts(make_engine(small_target(seed)), prompts)


def begin(engine: Engine, num_tokens: int = 4) -> list:
    """Requests that have written at least some tokens each."""
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while any(len(request.output) < num_tokens for request in requests):
        engine.step()
    assert not any(request.is_finished for request in requests)
    return requests


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gemma4", "mistral", "qwen2", "llama"])
def test_texts_and_drafts_are_those_of_an_engine_made_from_the_weights(family, method):
    model = lambda seed: tiny.target(seed, **tiny.FAMILIES[family])
    heads = tiny.head(method, 1), tiny.head(method, 2)
    engine, fresh = make_engine(model(OLD), heads[0]), make_engine(model(NEW), heads[1])
    before, wanted = texts(engine), fresh.generate(PROMPTS, GREEDY)
    engine.update_weights(nnx.state(model(NEW)), head=heads[1])
    found = engine.generate(PROMPTS, GREEDY)
    count = lambda done: (done.tokens, done.rounds, done.accepted)
    assert [count(one) for one in found] == [count(one) for one in wanted]
    assert [one.tokens for one in found] != before
    assert texts(engine) == [one.tokens for one in wanted]  # with prefixes of the new weights
    assert engine.generate(PROMPTS[:1], GREEDY)[0].cached >= 16


def test_requests_that_are_kept_go_on_as_the_new_weights_would(engine):
    requests = begin(engine)
    waiting = engine.add_request(PROMPTS[0], GREEDY)
    assert engine.update_weights(small_target(NEW), version="new") == []
    finish(engine)
    for request in requests:
        (first, old), (at, new) = request.versions
        assert (first, old, new) == (0, "0", "new")
        assert 4 <= at < MAX_TOKENS
        (wanted,) = natural(NEW, [request.prompt + request.output[:at]])
        assert request.output[at:] == wanted[: MAX_TOKENS - at]
        assert request.output[:at] == natural(OLD, [request.prompt])[0][:at]
    assert waiting.versions == [(0, "new")]


def test_requests_finish_on_the_old_weights_and_new_ones_wait(engine):
    requests = begin(engine)
    engine.scheduler._preempt(engine.scheduler.active[-1])
    waiting, seen = engine.add_request(PROMPTS[0], GREEDY, priority=-1), []
    updates = engine.update_weights(
        small_target(NEW), running="finish", on_update=lambda *update: seen.append(update)
    )
    assert seen == updates
    assert [request.output for request in requests] == natural(OLD)
    assert all(request.versions == [(0, "0")] for request in requests)
    assert not waiting.output
    finish(engine)
    assert waiting.output == natural(NEW)[0]


def test_requests_are_aborted_and_those_in_the_queue_run_on_the_new_weights(engine):
    requests = begin(engine)
    waiting = engine.add_request(PROMPTS[0], GREEDY)
    updates = engine.update_weights(small_target(NEW), running="abort")
    assert {id(request) for request, tokens in updates if not tokens} == set(map(id, requests))
    assert {request.finish_reason for request in requests} == {"abort"}
    finish(engine)
    assert waiting.output == natural(NEW)[0]
    assert waiting.versions == [(0, "1")]


def test_all_that_differs_is_named_and_the_engine_stays_as_it_was(engine):
    requests = begin(engine)
    broken = nnx.to_pure_dict(nnx.state(small_target(NEW)))
    layer = broken["layers"][0]
    layer["mlp"]["down"]["weight"] = layer["mlp"]["down"]["weight"].at[1, 2].set(jnp.inf)
    layer["attention"]["qkv"]["weight"] = jnp.zeros((3, 4))
    layer["post_norm"]["weight"] = layer["post_norm"]["weight"].astype(jnp.bfloat16)
    layer["post_norm"]["bias"] = jnp.zeros(3)
    del broken["lm_head"]
    head = small_head(seed=2)
    head.norm.weight.set_value(jnp.full(32, jnp.nan))
    with pytest.raises(ConfigError) as refusal:
        engine.update_weights(broken, head=head, running="abort", donate=True)
    assert str(refusal.value).splitlines() == [
        "target: the weights do not fit the engine:",
        "layers.0.attention.qkv.weight: float32 [3, 4], not float32 [64, 32]",
        "layers.0.mlp.down.weight: not finite",
        "layers.0.post_norm.bias: unknown",
        "layers.0.post_norm.weight: bfloat16 [32], not float32 [32]",
        "lm_head.weight: missing",
        "head: the weights do not fit the engine:",
        "norm.weight: not finite",
    ]
    finish(engine)
    assert engine.version == "0"
    assert [request.output for request in requests] == natural(OLD)
    with pytest.raises(ConfigError, match=r"config\.norm_eps: 1e-05, not 1e-06"):
        engine.update_weights(tiny.target(NEW, norm_eps=1e-5, **tiny.ONE_LAYER))
    with pytest.raises(ConfigError, match="running: 'wait' is none of"):
        engine.update_weights(small_target(NEW), running="wait")


COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kw: COMPILED.append(event) if "compile" in event else None
)


def test_nothing_compiles_and_memory_returns_to_its_level(engine):
    versions = [small_target(seed) for seed in (OLD, NEW)]
    heads = [small_head(seed=seed) for seed in (1, 2)]
    update = lambda i: engine.update_weights(versions[i % 2], head=heads[i % 2])
    wanted = natural(NEW)
    programs = engine.programs.num_compiled
    with moved_by_jax():
        update(1)  # checks and copies compile once
        assert texts(engine) == wanted
        level = held()
        COMPILED.clear()
        for i in range(100):
            update(i)
        assert texts(engine) == wanted
    assert engine.programs.num_compiled == programs
    assert held() == level
    assert COMPILED == []


def held() -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in jax.live_arrays())


def test_donated_arrays_are_the_engines_and_others_are_copied(engine):
    own = lambda seed: jax.tree.map(jnp.copy, small_target(seed))
    copied, given = own(NEW), own(OLD)
    engine.update_weights(copied)
    for leaf in jax.tree.leaves(copied):
        leaf.delete()  # as a training step does that donates them
    assert texts(engine) == natural(NEW)
    engine.update_weights(given, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert texts(engine) == natural(OLD)


def test_a_paused_engine_commits_what_is_in_flight_and_goes_on_later(engine):
    requests = begin(engine)
    engine.pause()
    finish(engine)
    assert not any(request.is_finished for request in requests)
    assert engine.step() == []
    with pytest.raises(NotReady, match="resume"):
        texts(engine)
    with pytest.raises(NotReady, match="paused"):
        engine.update_weights(small_target(NEW), running="finish")
    engine.resume()
    finish(engine)
    assert [request.output for request in requests] == natural(OLD)


def test_a_released_cache_holds_no_memory_and_requests_go_on_after_it(engine):
    requests, level = begin(engine), held()
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(engine._state))
    programs = engine.programs.num_compiled
    engine.release_cache()
    assert held() == level - num_bytes
    for refused in (engine.step, engine.release_cache, lambda: texts(engine)):
        with pytest.raises(NotReady, match="restore_cache"):
            refused()
    assert not engine.has_work
    engine.restore_cache()
    with pytest.raises(NotReady, match="not released"):
        engine.restore_cache()
    finish(engine)
    assert [request.output for request in requests] == natural(OLD)
    assert engine.programs.num_compiled == programs
