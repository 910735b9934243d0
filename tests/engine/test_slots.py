"""Free slots: which prefixes their rings still hold."""

from dataclasses import replace

import pytest

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.slots import FreeSlots, Reach, SavedRings
from tests.engine.fake_engine import FakeEngine, check_finished, make_config

CONFIG = EngineConfig(num_draft=2, max_num_seqs=3, max_model_len=200, page_size=4, prefill_chunk=8)
WINDOW = 10
CAPACITY = CONFIG.ring_pages(WINDOW) * CONFIG.page_size


def test_without_windows_any_slot_can_reuse_all_pages():
    slots = FreeSlots(CONFIG, Reach(CONFIG, []))
    slots.take(0)
    slots.release(0, [5, 6, 7], 100)
    assert slots.choose([5, 6, 7, 8]) == (1, 4)
    assert slots.choose([]) == (1, 0)


@pytest.mark.parametrize("window", [WINDOW, 10_000])
def test_the_slot_whose_rings_hold_most_of_the_prefix_is_chosen(window):
    slots = FreeSlots(CONFIG, Reach(CONFIG, [window]))
    for slot in range(3):
        slots.take(slot)
    slots.release(2, [1, 2, 9], CAPACITY)
    slots.release(0, [1, 2, 3, 4], CAPACITY)
    slots.release(1, [8], CAPACITY)
    assert slots.choose([1, 2, 3, 4, 5]) == (0, 4)
    assert slots.choose([1, 2, 3]) == (0, 3)
    assert slots.choose([1, 2, 9]) == (2, 3)
    assert slots.choose([1]) == (2, 1)
    assert slots.choose([7]) == (2, 0), "the slot that is free the longest"
    assert slots.take(0) == CAPACITY
    assert slots.choose([1, 2, 3, 4]) == (2, 2)


def test_a_ring_holds_the_window_before_a_position_until_it_is_overwritten():
    slots = FreeSlots(CONFIG, Reach(CONFIG, [WINDOW, WINDOW // 2]))
    chain = list(range(100, 130))
    for slot in range(3):
        slots.take(slot)
    written = 90
    slots.release(0, chain, written)
    least = -(-(written - CAPACITY + WINDOW) // CONFIG.page_size)
    assert 0 < least < len(chain)
    assert slots.choose(chain[:least]) == (0, least)
    assert slots.choose(chain[: least - 1]) == (0, 0)


def saved_rings(number: int = 2) -> SavedRings:
    config = replace(CONFIG, saved_rings=number)
    return SavedRings(config, Reach(config, [WINDOW]))


def test_the_copy_that_is_used_the_least_makes_room():
    saved = saved_rings(2)
    first, second = (saved.save([chain], 4, [1]) for chain in (5, 6))
    assert saved.restore(first) == 4
    assert saved.save([7], 4, [1]) == second
    assert [saved.choose([chain])[1] for chain in (5, 6, 7)] == [1, 0, 1]
    assert (saved.num_saved, saved.num_restored) == (3, 1)
    assert saved.save([5], 4, [1]) is None, "there is one, and it counts as used"
    assert saved.save([8], 4, [1]) == second


def chat(windows, *, turns: int = 4) -> tuple[FakeEngine, list[int]]:
    """An engine after a chat beside other requests, and the tokens that each turn found."""
    config = make_config(J=3, B=3, max_len=200, Z=4, P=200, T=8, R=2)
    engine = FakeEngine(config, windows=windows)
    text, found, requests = [7, 8, 9] * 4, [], []
    for turn in range(turns):
        requests.append(engine.add(list(text), max_tokens=9, ignore_eos=True))
        requests.append(engine.add([turn] * 30, max_tokens=3, ignore_eos=True))
        engine.drain()
        found.append(requests[-2].num_cached)
        text = [*requests[-2].tokens, 3, turn, 4]
    for request in requests:
        check_finished(request, engine)
    return engine, found


@pytest.mark.parametrize("windows", [(), (6,), (6, 11, 1000)])
def test_the_next_turn_of_a_chat_finds_the_turn_before(windows):
    """12 tokens, then 9 and 3 more a turn; the last one of a turn has no keys yet."""
    assert chat(windows)[1] == [0, 20, 32, 44]
