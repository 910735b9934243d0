"""Weights that change while the engine lives: texts are those of an engine made from them, and what
does not fit changes nothing.
"""

import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.random_weights import random_target
from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.checkpoint import Checkpoint, load_target, save_target
from peagle_jax.checkpoint.safetensors import write
from peagle_jax.devices import Devices
from peagle_jax.errors import NotReady
from peagle_jax.method.drafter import make_drafter
from peagle_jax.models import weight_order
from peagle_jax.models.weight_order import arrange_weights, tile_columns
from tests import tiny
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
GOLDEN = Path(__file__).parents[1] / "golden"


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


def finish(engine: Engine, on_update=lambda request, tokens: None) -> None:
    while engine.has_work:
        engine.step(on_update)
        engine.scheduler.check_integrity()


@pytest.mark.sampled(0, slow=5)
@pytest.mark.parametrize("method", ["peagle", "eagle3", "dflash"])
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


def updated_from_all(engine: Engine, fresh: Engine, old, sources: dict) -> None:
    """Updates from each source, with the old weights between them; texts must be those of `fresh`,
    which was made from the same weights.
    """
    before, wanted = texts(engine), texts(fresh)
    assert before != wanted
    for name, make in sources.items():
        engine.update_weights(make())
        assert texts(engine) == wanted, name
        engine.update_weights(old)
        assert texts(engine) == before, name


def named(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a folder, of jax and of numpy."""
    checkpoint = Checkpoint(folder)
    for i, name in enumerate(checkpoint.names()):
        array = np.array(checkpoint.read(name))
        yield name, jnp.asarray(array) if i % 2 else array


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """The small targets of both versions."""
    made = {seed: tmp_path_factory.mktemp("model") for seed in (OLD, NEW)}
    for seed, folder in made.items():
        save_target(small_target(seed), folder, dtype="float32")
    return made


@pytest.mark.parametrize("quantization", [None, pytest.param("fp8", marks=pytest.mark.slow)])
def test_all_sources_give_the_same_weights(quantization, folders):
    load = lambda seed: load_target(folders[seed], dtype="float32", quantization=quantization)
    updated_from_all(
        make_engine(load(OLD), small_head()),
        make_engine(load(NEW), small_head()),
        folders[OLD],
        {
            "folder": lambda: str(folders[NEW]),
            "names": lambda: named(folders[NEW]),
            "dict of names": lambda: dict(named(folders[NEW])),
            "module": lambda: load(NEW),
            "unquantised module": lambda: small_target(NEW),
            "pure dict": lambda: nnx.to_pure_dict(nnx.state(load(NEW))),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "qwen3_moe-fp8", "qwen3-fp8-channel"])
def test_quantised_checkpoints_keep_their_values(name, tmp_path):
    old = GOLDEN / name
    shutil.copytree(old, tmp_path, dirs_exist_ok=True)
    tensors = {name: np.roll(array, 1, axis=0) for name, array in named(old)}
    write(tmp_path / "model.safetensors", tensors)
    load = lambda folder: load_target(folder, dtype="float32")
    updated_from_all(
        make_engine(load(old)),
        make_engine(load(tmp_path)),
        load(old),
        {
            "folder": lambda: tmp_path,
            "names": lambda: tensors.items(),
            "module": lambda: load(tmp_path),
        },
    )


def test_columns_are_made_of_rows(monkeypatch):
    """As a CPU of few cores reads float32 weights."""
    monkeypatch.setattr(weight_order, "MOST_CORES", 1000)

    def columns(seed):
        model = jax.tree.map(jnp.copy, small_target(seed))  # tests share arrays
        tile_columns(model)
        return model

    assert any(leaf.ndim == 3 for leaf in jax.tree.leaves(columns(OLD)))
    sources = {"rows": lambda: small_target(NEW), "columns": lambda: columns(NEW)}
    updated_from_all(
        make_engine(columns(OLD)), make_engine(columns(NEW)), small_target(OLD), sources
    )


def test_scales_of_rows_cannot_be_made_here():
    """Loading quantises to blocks; programs for scales of rows take no others."""
    old = load_target(GOLDEN / "qwen3-fp8-channel", dtype="float32")
    engine, plain = make_engine(old), load_target(GOLDEN / "qwen3", dtype="float32")
    with pytest.raises(ConfigError, match=r"mlp.down.weight: float32 .*, not float8_e4m3fn"):
        engine.update_weights(plain)
    assert texts(engine) == texts(make_engine(old))


@pytest.mark.slow
def test_tiles_are_made_of_rows():
    """As Hopper has them; the reference reads both."""
    config = replace(tiny.TARGET, hidden_size=128, intermediate_size=128, num_layers=1)
    rows = lambda seed: random_target(config, "fp8", dtype="float32", seed=seed)

    def tiles(seed):
        model = rows(seed)
        arrange_weights(model, in_tiles=True)
        return model

    engine = make_engine(tiles(OLD))
    assert any(leaf.shape[-1] == 8192 for leaf in jax.tree.leaves(tiles(OLD)))
    sources = {"rows": lambda: rows(NEW), "tiles": lambda: tiles(NEW)}
    updated_from_all(engine, make_engine(tiles(NEW)), rows(OLD), sources)
    given = rows(NEW)
    begin(engine)
    engine.pause()
    with pytest.raises(NotReady):
        engine.update_weights(given, running="finish", donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_arrays_of_the_device_are_quantised_as_those_of_the_host(count):
    widths = dict(hidden_size=256, intermediate_size=256, head_dim=128)
    config = replace(tiny.TARGET, num_layers=1, **widths)
    model = lambda form, seed: random_target(config, form, dtype="float32", seed=seed)
    engine = one_bucket(Engine(model("fp8", OLD), None, replace(CONFIG, tensor_parallel=count)))
    given, found = [model("bf16", seed) for seed in (OLD, NEW)], []
    for weights in (*[jax.tree.map(np.array, nnx.state(one)) for one in given], *given):
        engine.update_weights(weights, donate=True)
        found.append(texts(engine))
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["peagle", "selector"])
def test_each_of_two_devices_gets_its_share(method, tmp_path):
    """The vocabulary of 100 has padding on the second device."""
    sizes = dict(vocab_size=100, **tiny.ONE_LAYER)
    model = lambda seed: tiny.target(seed, **sizes)
    heads = [
        tiny.head(method, seed, vocab_size=100, draft_vocab_size=100, **tiny.HEAD_OF_ONE_LAYER)
        for seed in (1, 2)
    ]
    save_target(model(NEW), tmp_path, dtype="float32")
    config = replace(CONFIG, tensor_parallel=2, check_replicas=True)
    prompts = [[token % 100 for token in prompt] for prompt in PROMPTS]
    engine, fresh = (
        one_bucket(Engine(model(seed), head, config))
        for seed, head in zip((OLD, NEW), heads, strict=True)
    )
    placed = Devices.of(config).placed(model(NEW))
    wanted = fresh.generate(prompts, GREEDY)
    for source in (model(NEW), tmp_path, named(tmp_path), placed):
        engine.update_weights(source, head=heads[1])
        found = engine.generate(prompts, GREEDY)
        count = lambda done: (done.tokens, done.accepted)
        assert [count(one) for one in found] == [count(one) for one in wanted]
        engine.update_weights(model(OLD))
        engine.update_weights(head=heads[0])
        assert texts(engine, prompts) != [one.tokens for one in wanted]
    engine.release_cache()
    engine.restore_cache()
    with pytest.raises(ConfigError, match=r"embed.weight: float32 \[128, 32\], not float32 \[100"):
        engine.update_weights(small_target(NEW))


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


def test_all_arrays_with_names_that_do_not_fit_are_named(engine, folders):
    arrays, layer = dict(named(folders[NEW])), "model.layers.0"
    arrays[f"{layer}.self_attn.q_proj.weight"] = jnp.zeros((3, 4))
    arrays["model.norm.weight"] = np.zeros(5, np.float32)
    down = f"{layer}.mlp.down_proj.weight"
    arrays[down] = jnp.zeros(arrays[down].shape, int)
    arrays["model.surprise"] = arrays.pop("lm_head.weight")
    with pytest.raises(ConfigError) as refusal:
        engine.update_weights(arrays.items())
    said = re.findall(r"(\S+) (?:has|is) (\S+)|: (\[.*)", str(refusal.value))
    assert [[part for part in parts if part] for parts in said] == [
        [f"{layer}.self_attn.q_proj.weight", "shape"],
        [down, "int32;"],
        ["model.norm.weight", "shape"],
        ["'lm_head.weight'", "missing;"],
        ["['model.surprise']"],
    ]
    assert texts(engine) == natural(OLD)


def deleted(array: jax.Array) -> jax.Array:
    array.delete()
    return array


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        (lambda: 5, "a int is no model"),
        (lambda: [jnp.zeros(3)], "pairs of a name and an array"),
        (lambda: [("model.norm.weight", 3)], "pairs of a name and an array"),
        (lambda: [("a", jnp.zeros(3))] * 2, "'a' comes twice"),
        (lambda: [("a", deleted(jnp.zeros(3)))], "'a' is deleted"),
        (lambda: {"norm": {"weight": deleted(jnp.zeros(32))}}, "norm.weight: deleted"),
    ],
)
def test_what_is_no_model_is_refused(engine, weights, rule):
    with pytest.raises(ConfigError, match=rule):
        engine.update_weights(weights())
    with pytest.raises(ConfigError, match="version: 5 is no text"):
        engine.update_weights(small_target(NEW), version=5)
    assert engine.version == "0"


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


def test_the_engine_holds_one_model_while_it_takes_another(engine, monkeypatch):
    """From arrays of the host, which lie beside the device's as the old ones go."""
    at_host = lambda model: jax.tree.map(np.array, nnx.state(model))
    head, *targets = map(at_host, (small_head(seed=2), small_target(OLD), small_target(NEW)))
    engine.update_weights(targets[0], head=head)  # the engine's arrays are its own
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(engine.programs.models)]
    copied, peaks, level = jnp.copy, [], held()

    def sampled(array):
        made = copied(array)
        peaks.append(held())
        return made

    monkeypatch.setattr(jnp, "copy", sampled)
    engine.update_weights(targets[1], head=head)
    assert len(peaks) > len(sizes) / 2
    assert max(peaks) - level <= 3 * max(sizes) < sum(sizes) / 2
    assert texts(engine) == natural(NEW)


def test_an_array_of_two_names_is_donated_once(engine):
    head = jax.tree.map(jnp.copy, small_head(seed=2))
    model = jax.tree.map(jnp.copy, small_target(NEW))
    model.lm_head.weight.set_value(model.embed.weight.get_value())
    wanted = make_engine(jax.tree.map(jnp.copy, model))
    engine = make_engine(small_target(OLD), jax.tree.map(jnp.copy, head))
    head.embed.weight.set_value(model.embed.weight.get_value())
    engine.update_weights(model, head=head, donate=True)
    assert texts(engine) == texts(wanted)


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


def test_weights_change_while_another_thread_compiles(engine, monkeypatch):
    made = engine.programs._make
    begun, may_end = threading.Event(), threading.Event()

    def slowly(*arguments):
        begun.set()
        may_end.wait()
        return made(*arguments)

    monkeypatch.setattr(engine.programs, "_make", slowly)
    compiler = threading.Thread(target=engine.compile_next)
    compiler.start()
    begun.wait()
    given = jax.tree.map(jnp.copy, small_target(NEW))
    engine.update_weights(given, donate=True)
    engine.release_cache()
    may_end.set()
    compiler.join()
    engine.restore_cache()
    assert texts(engine, PROMPTS[:1]) == natural(NEW, PROMPTS[:1])


def test_an_update_that_fails_half_way_must_be_made_again(engine, monkeypatch):
    copied, calls = jnp.copy, iter(range(3))

    def few(array):
        if next(calls, None) is None:
            raise MemoryError
        return copied(array)

    monkeypatch.setattr(jnp, "copy", few)
    with pytest.raises(MemoryError):
        engine.update_weights(small_target(NEW))
    with pytest.raises(NotReady, match="half-way"):
        engine.step()
    monkeypatch.undo()
    engine.update_weights(small_target(NEW))
    assert texts(engine) == natural(NEW)


def test_a_drafter_of_the_users_own_stays_as_it_is(programs_without_controls):
    own = make_drafter(small_head(), CONFIG.num_draft, "argmax")
    layers = [own.head.config.attention(0)]
    model = small_target(OLD)
    drafting = Engine(model, None, CONFIG, drafter=own, taps=own.head.config.taps, cache=layers)
    engine = one_bucket(drafting)
    engine.update_weights(small_target(NEW))
    assert texts(engine) == natural(NEW)
    with pytest.raises(ConfigError, match="head: the engine drafts without a head"):
        engine.update_weights(head=small_head(seed=2))


def test_nothing_changes_within_a_step(engine):
    def update(request, tokens):
        engine.update_weights(small_target(NEW))

    engine.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(NotReady, match="within a step"):
        finish(engine, update)


def test_k_is_chosen_anew_and_times_of_rounds_stay(programs_without_controls):
    config = replace(CONFIG, adaptive="load")
    engine = one_bucket(Engine(small_target(OLD), small_head(), config))
    times, row = engine.policy.times, (begin(engine)[0], 3, 2)
    engine.policy.record([row] * 20)
    assert engine.policy.shares["greedy"][0] > 0
    engine.update_weights(head=small_head(seed=2))
    assert engine.policy.shares["greedy"] == [0, 0, 0]
    assert engine.policy.times is times
    assert engine.version == "0"  # of the target


def parts_of(request) -> list[tuple[int, int, str]]:
    """(first token, end, version) of what each version wrote."""
    ends = [*(at for at, _ in request.versions[1:]), len(request.output)]
    return [(at, end, name) for (at, name), end in zip(request.versions, ends, strict=False)]


@pytest.mark.slow
def test_random_updates_pauses_and_aborts(engine, num_cases):
    """What each version wrote is what it would write after the tokens before."""
    plain = {str(seed): make_engine(small_target(seed)) for seed in (OLD, NEW)}
    engine.update_weights(small_target(OLD), version=str(OLD))
    for case in range(num_cases("walks over updates, pauses and aborts", 20)):
        rng = np.random.default_rng(case)
        requests = []
        for _ in range(60):
            walk(engine, requests, rng)
            engine.scheduler.check_integrity()
        if not engine._has_cache:
            engine.restore_cache()
        engine.resume()
        finish(engine)
        for request in requests:
            assert request.is_finished
            assert request.finish_reason == "abort" or len(request.output) == MAX_TOKENS
            for at, end, version in parts_of(request):
                (wanted,) = texts(plain[version], [request.prompt + request.output[:at]])
                assert request.output[at:end] == wanted[: end - at]


def walk(engine: Engine, requests: list, rng: np.random.Generator) -> None:
    """One random operation."""
    match rng.choice(["add", "step", "update", "abort", "pause", "release"], p=OFTEN):
        case "add" if engine.scheduler.num_places:
            requests.append(engine.add_request(PROMPTS[rng.integers(3)], GREEDY))
        case "step" if engine._has_cache:
            engine.step()
        case "update":
            seed, modes = int(rng.choice([OLD, NEW])), ["keep", "abort"]
            can_finish = engine._has_cache and not engine._is_paused
            engine.update_weights(
                small_target(seed),
                version=str(seed),
                head=small_head(seed=int(rng.integers(1, 3))),
                running=rng.choice([*modes, *["finish"] * can_finish]),
            )
        case "abort" if requests:
            engine.abort(requests[rng.integers(len(requests))])
        case "pause":
            engine.pause() if rng.integers(2) else engine.resume()
        case "release":
            (engine.release_cache if engine._has_cache else engine.restore_cache)()


OFTEN = [0.2, 0.55, 0.1, 0.05, 0.05, 0.05]
