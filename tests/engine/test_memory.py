"""Sizing of the page pool."""

from dataclasses import replace

import jax
import pytest

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine import memory
from tests.tiny import HEAD, TARGET

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=64, page_size=16)
# 3 target and 2 draft layers of 2 heads of 8, keys and values, 16 tokens, float32.
PAGE = 5 * 2 * 8 * 2 * 16 * 4


def test_a_page_counts_target_and_drafter():
    assert memory.page_bytes(TARGET, HEAD, CONFIG) == PAGE
    assert memory.page_bytes(TARGET, HEAD, replace(CONFIG, dtype="bfloat16")) == PAGE // 2
    assert memory.page_bytes(TARGET, HEAD, replace(CONFIG, kv_cache_dtype="fp8")) == PAGE // 4


@pytest.mark.parametrize(("free_pages", "expected"), [(1000, 17), (10, 10), (5, 5)])
def test_the_pool_is_the_worst_case_or_what_fits(monkeypatch, free_pages, expected):
    monkeypatch.setattr(memory, "free_bytes", lambda: int(free_pages * PAGE / 0.85) + PAGE // 2)
    assert memory.fit_pages(TARGET, HEAD, CONFIG) == expected


def test_one_longest_request_must_fit(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: int(4.5 * PAGE / 0.85))
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        memory.fit_pages(TARGET, HEAD, CONFIG)


def test_file_cache_counts_as_free(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemFree: 3 kB\nMemAvailable: 70 kB\n")
    assert memory._free_host_bytes(meminfo) == 70 * 1024


def test_holes_lie_between_arrays_that_stay():
    before = len(jax.live_arrays())
    kept = memory.carve_holes()
    assert len(kept) == sum(memory._HOLES.values())
    assert len(jax.live_arrays()) - before == len(kept), "the holes themselves must be free"
    assert not any(array.is_deleted() for array in kept)
