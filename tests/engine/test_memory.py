"""Sizing of the page pool."""

import gc
import random
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.device import memory
from peagle_jax.engine.device.memory import DeviceSummary
from peagle_jax.engine.device.resolve import resolve_config
from peagle_jax.method.step import init_state
from tests.tiny import FAMILIES, HEAD, TARGET

CONFIG = EngineConfig(num_draft=1, prefill_chunk=8, max_num_seqs=4, max_model_len=64, page_size=16)
# 3 target and 2 draft layers of 2 heads of 8, keys and values, 16 tokens, float32.
PAGE = 5 * 2 * 8 * 2 * 16 * 4
CONTROLS = memory.control_bytes(TARGET, CONFIG, "cpu")


def cpu(free: float) -> DeviceSummary:
    return DeviceSummary("cpu", int(free), uses_host_memory=True)


def gpu(free: float) -> DeviceSummary:
    return DeviceSummary("cuda", int(free))


def fit(free: float, target=TARGET, head=HEAD, config=CONFIG, **changes) -> int:
    """Pages on a CPU with so many free bytes."""
    return memory.fit_pages(target, head, replace(config, **changes), cpu(free))


@pytest.mark.parametrize(
    ("free_pages", "without", "on_a_cpu", "on_a_gpu"),
    [(1000, 17, 4 * 16 + 1, 1000), (60, 17, 60, 60), (10, 10, 10, 10), (5, 5, 5, 5)],
)
def test_the_pool_is_the_worst_case_or_what_fits(free_pages, without, on_a_cpu, on_a_gpu):
    """The prefix cache takes what the slots leave."""
    free = (CONTROLS + (free_pages + 0.4) * PAGE) / 0.85
    assert fit(free, prefix_caching=False) == without
    assert fit(free) == on_a_cpu
    assert fit(free, num_pages=5) == 5
    assert memory.fit_pages(TARGET, HEAD, CONFIG, gpu(free)) == on_a_gpu


def test_the_prefix_cache_leaves_room_for_one_call_and_stays_within_int32():
    target = replace(TARGET, vocab_size=10**6)
    needed = 4 * 8 * target.vocab_size  # four rows of two logits
    controls = memory.control_bytes(target, CONFIG, "cuda")
    free = needed + controls + 50 * PAGE
    assert memory.fit_pages(target, HEAD, CONFIG, gpu(free)) == 50
    pages = memory.fit_pages(target, HEAD, CONFIG, gpu(2**50))
    assert 0.9 < pages * 16 * 2 * 8 * 4 / 2**31 < 1  # bytes of the keys of one layer


def test_saved_rings_have_a_bound():
    """As many as 256 MiB hold, fewer where little is free, and the number that is asked for."""
    target = replace(TARGET, sliding_windows=(1000, 1000, None), head_dim=512)
    config = replace(CONFIG, max_model_len=2048)
    one = memory.saved_bytes(target, None, replace(config, saved_rings=1))
    assert one == 2 * config.ring_pages(1000) * 16 * 2 * 2 * 512 * 4
    fit = lambda free=None, **changes: memory.fit_rings(
        target, None, replace(config, **changes), free
    )
    assert fit() == 2**28 // one
    assert fit(max_model_len=32) == memory._MOST_SAVED
    assert (fit(saved_rings=3), fit(saved_rings=0), fit(prefix_caching=False)) == (3, 0, 0)
    assert fit(30 * one) == 1
    assert memory.fit_rings(TARGET, None, config, None) == 0
    kept = memory.ring_bytes(target, None, replace(config, saved_rings=7))
    assert kept == (4 + 1 + 7) * one


def test_a_little_more_or_less_memory_changes_no_number_of_pages():
    """Compiled programs are found again only by an engine with the same number."""
    free = [(CONTROLS + (pages + 0.4) * PAGE) / 0.85 for pages in range(10_050, 10_110)]
    (number,) = {memory.fit_pages(TARGET, HEAD, CONFIG, gpu(nbytes)) for nbytes in free}
    assert 0.98 * 10_050 < number <= 10_050


def test_rings_must_fit_where_no_layer_has_pages():
    """Every layer of a Mistral slides; without a head nothing else takes cache."""
    target = replace(TARGET, **FAMILIES["mistral"])
    config = replace(CONFIG, num_draft=0)
    needed = memory.ring_bytes(target, None, config)
    controls = memory.control_bytes(target, config, "cpu")
    assert memory.page_bytes(target, None, config) == 0
    assert fit(2 * needed + 2 * controls, target, None, config) == config.total_pages
    with pytest.raises(ConfigError, match=f"{needed:,} for layers with a sliding window"):
        fit(needed, target, None, config)


def test_too_many_pages_are_answered_with_the_most_that_fit():
    """100 TB of pages: lower lengths or batches would not help."""
    free = (CONTROLS + 60.4 * PAGE) / 0.85
    with pytest.raises(ConfigError, match="not enough memory") as caught:
        fit(free, num_pages=10**14 // PAGE)
    rule = f"what fits is num_pages=60 (--kv-cache-memory {60 * PAGE}B)"
    assert str(caught.value).endswith(rule)
    assert fit(free, num_pages=60) == 60
    with pytest.raises(ConfigError, match=r"; lower .*--kv-cache-memory.* and --max-model-len and"):
        fit(0, num_pages=60)


def test_too_few_pages_are_answered_with_the_least():
    with pytest.raises(ConfigError) as caught:
        replace(CONFIG, num_pages=CONFIG.pages_per_seq)
    message, least = str(caught.value), CONFIG.pages_per_seq + 1
    assert message.startswith(f"num_pages={least - 1} cannot hold one request of max_model_len=")
    assert f"raise num_pages to {least} or lower max_model_len" in message
    assert "self" not in message
    assert replace(CONFIG, num_pages=least).total_pages == least


@pytest.mark.parametrize("seed", range(3))
def test_the_sizes_that_are_named_fit_and_no_larger_ones(num_cases, seed):
    rng, num_refused = random.Random(seed), 0
    for _ in range(num_cases("sizes and memories", 100, least=30)):
        free = int(10 ** rng.uniform(4, 9))
        config = EngineConfig(
            num_draft=rng.choice([0, 1, 7]),
            max_num_seqs=int(10 ** rng.uniform(0, 6)),
            max_model_len=int(10 ** rng.uniform(0, 9)),
            prefill_chunk=int(10 ** rng.uniform(1, 6)),
            dtype=rng.choice(["float32", "bfloat16"]),
        )
        target = replace(TARGET, sliding_windows=rng.choice([None, (8, None, 8), (8, 8, 8)]))
        try:
            pages = fit(free, target, HEAD, config)
        except ConfigError as error:
            message = str(error)
        else:
            assert config.pages_per_seq + 1 <= pages <= 4 * config.total_pages
            continue
        num_refused += 1
        for flag, value in re.findall(r"--([a-z-]+) (\d+)", message):
            name, value = flag.replace("-", "_"), int(value)
            fit(free, target, HEAD, config, **{name: value})
            if value + 1 < getattr(config, name):
                with pytest.raises(ConfigError, match="not enough memory"):
                    fit(free, target, HEAD, config, **{name: value + 1})
    assert num_refused > 10


@pytest.mark.parametrize(
    ("pool", "preallocate", "free"),
    [(600, None, 500), (600, "false", 900), (None, None, 900), (0, None, 900), (1000, None, 900)],
    ids=["another process has the rest", "grows", "no pool", "no pool yet", "whole"],
)
def test_free_memory_is_that_of_the_pool_which_jax_got(
    monkeypatch, caplog, pool, preallocate, free
):
    stats = dict(bytes_limit=1000, bytes_in_use=100) | (
        {} if pool is None else {"pool_bytes": pool}
    )
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(memory, "first_devices", lambda count: [device])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    if preallocate is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", preallocate)
    assert memory.free_bytes(1) == free
    assert ("another process uses the device" in caplog.text) == (free == 500)


@pytest.mark.parametrize("changes", [dict(), dict(draft_sampling="sample")])
def test_what_a_state_holds_of_drafts_is_part_of_the_plan(monkeypatch, changes):
    """Their distributions: the pages leave room for them."""
    config = replace(CONFIG, max_num_seqs=64, prefix_caching=False, num_pages=60, **changes)
    state = jax.eval_shape(lambda: init_state(TARGET, HEAD, config))
    held = [state.draft_probs]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    assert memory.draft_bytes(TARGET, config) == size
    monkeypatch.setattr(memory, "_call_bytes", lambda *_: 0)
    needed = sum(memory._needs(TARGET, HEAD, config, "cpu").values())
    assert fit(needed / 0.85 + 1, config=config) == 60
    if size:
        with pytest.raises(ConfigError, match=f"{size:,} for drafts"):
            fit((needed - size) / 0.85, config=config)


def test_a_configuration_is_resolved_without_a_device(monkeypatch):
    """Of one model on equal devices every process chooses the same, whatever it runs on itself."""

    def refuse(*args, **rules):
        raise AssertionError("a device is asked")

    for name in ("devices", "local_devices", "device_put"):
        monkeypatch.setattr(jax, name, refuse)
    target = replace(TARGET, sliding_windows=(8, None, 8))
    resolve = lambda devices, **changes: resolve_config(
        target, HEAD, replace(CONFIG, **changes), devices, weights_bytes=2**20
    )
    changes = dict(max_model_len=10**6, small_prefills=True, adaptive="load")
    found = resolve(gpu(2**30), **changes)
    assert found == resolve(gpu(2**30), **changes)
    assert (found.max_model_len, found.rounds_per_call) == (TARGET.max_position, 4)
    assert (found.long_prefills, found.gather) == (False, "auto")
    assert resolve(cpu(2**30)).rounds_per_call == 1
    assert resolve(cpu(2**30)).num_pages < found.num_pages
    assert resolve(replace(gpu(2**30), gather="peers"), tensor_parallel=2).gather == "peers"


def test_memory_of_dead_cycles_is_free():
    """Nothing collects garbage while a server starts; replaced weights stay in a cycle."""

    class Module:
        def __init__(self):
            self.weight, self.itself = jax.numpy.ones(8), self

    gc.disable()
    try:
        replaced = weakref.ref(Module())
        assert replaced() is not None
        memory.free_bytes(1)
        assert replaced() is None
    finally:
        gc.enable()
