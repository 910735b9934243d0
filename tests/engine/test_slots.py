"""Free slots: which prefixes their rings still hold."""

import pytest

from tests.engine.fake_engine import FakeEngine, check_finished, make_config


def chat(windows, *, turns: int = 4) -> tuple[FakeEngine, list[int]]:
    """An engine after a chat beside other requests, and the tokens that each turn found."""
    config = make_config(J=3, B=3, max_len=200, Z=4, P=200, T=8, R=2, N=2)
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
