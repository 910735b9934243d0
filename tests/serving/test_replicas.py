"""Two servers behind the smg gateway: balance, prefixes, a killed server, a rolling restart."""

import itertools

import pytest

from tests import tiny
from tests.serving.conftest import EOS_IDS
from tests.serving.fleet import MAX_POSITION, Fleet, Load, save_model
from tests.waiting import LIMIT

pytestmark = pytest.mark.slow
PAGE = 16
TOKENS = 128


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, tokenizer):
    """Servers and gateway; a test that ends a server starts it again."""
    folder = tmp_path_factory.mktemp("fleet")
    target = tiny.target(eos_ids=EOS_IDS, max_position=MAX_POSITION, **tiny.ONE_LAYER)
    model = save_model(folder, target, tokenizer)
    made = Fleet(folder, model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts():
    """Texts without a common beginning: the gateway sends such to different servers."""
    letters = itertools.product("ABCDEFGHIJKLMNOPQRSTUVWXYZ", repeat=2)
    return (f"{a}{b} = 0\n# computes {a}{b} of all the items of a list\n" for a, b in letters)


@pytest.fixture
def prompts(fleet, texts):
    """Four texts: the gateway sends the first two to the first server, the others to the second."""
    found = [[], []]

    def is_enough() -> bool:
        before, text = fleet.completed, next(texts)
        fleet.post("/v1/completions", prompt=text, max_tokens=1)
        fleet.wait(lambda: sum(fleet.completed) == sum(before) + 1, "a log has the request")
        found[fleet.completed[0] == before[0]].append(text)
        return min(map(len, found)) >= 2

    fleet.wait(is_enough, "both servers got two requests of some")
    return [text for some in found for text in some[:2]]


def have_grown(now: list[int], then: list[int]) -> bool:
    return all(b > a for a, b in zip(then, now, strict=True))


def test_the_second_turn_of_a_chat_finds_its_prefix(fleet, texts):
    """Chats are on both servers, and each server has the prefixes of its own chats only.

    One of eight may miss: the gateway leaves a server that does not answer for two seconds.
    """

    def talk(text: str) -> bool:
        messages = [dict(role="user", content=text)]
        first = fleet.post("/v1/chat/completions", messages=messages, max_tokens=32)
        answer = dict(role="assistant", content=first["choices"][0]["message"]["content"])
        messages += [answer, dict(role="user", content="def test():")]
        second = fleet.post("/v1/chat/completions", messages=messages, max_tokens=2)
        shared = first["usage"]["prompt_tokens"] // PAGE * PAGE
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < PAGE <= shared
        return second["usage"]["prompt_tokens_details"]["cached_tokens"] >= shared

    before = fleet.completed
    found = [talk(text) for text in itertools.islice(texts, 8)]
    assert sum(found) >= 7
    # More: a log is written after the answer, so `before` may lack requests of earlier tests.
    fleet.wait(lambda: sum(fleet.completed) >= sum(before) + 16, "the logs have all requests")
    assert have_grown(fleet.completed, before)


def test_a_killed_server_costs_only_the_streams_that_had_begun(fleet, texts, prompts):
    """Unary requests are repeated elsewhere, broken streams end with an error."""
    other, killed = fleet.replicas
    with Load(fleet.url, prompts, max_tokens=TOKENS) as load:
        before = fleet.completed
        fleet.wait(lambda: have_grown(fleet.completed, before), "both servers have work")
        killed.kill()
        fleet.wait(lambda: fleet.statuses()[1] != "ready", "the gateway knows")
        load.wait_for(len(prompts))
    assert all(one.was_streamed and "error" in one.error for one in load.failed), load.failed
    assert len(load.failed) <= 1  # of the two clients of this server one streams
    check_texts(load, prompts)
    served = other.completed
    for prompt in prompts:
        fleet.post("/v1/completions", prompt=prompt, max_tokens=1)
    fleet.wait(lambda: other.completed >= served + len(prompts), "the other one served them")
    killed.start()
    fleet.wait_until_ready()
    served = killed.completed

    def works_again() -> bool:
        fleet.post("/v1/completions", prompt=next(texts), max_tokens=1)
        return killed.completed > served

    fleet.wait(works_again, "the restarted server gets work")


def test_a_rolling_restart_fails_no_request(fleet, prompts):
    """The gateway prefers the server that has a prompt, also while that drains."""
    with Load(fleet.url, prompts, max_tokens=TOKENS) as load:
        for i, replica in enumerate(fleet.replicas):
            load.wait_for(len(prompts))
            replica.process.process.terminate()
            assert replica.process.process.wait(LIMIT) == 0
            # Otherwise "ready" could be the state before.
            fleet.wait(lambda i=i: fleet.statuses()[i] != "ready", "the gateway knows")
            replica.start()
            fleet.wait_until_ready()
        load.wait_for(len(prompts))
    assert not load.failed
    check_texts(load, prompts)


def check_texts(load: Load, prompts: list[str]) -> None:
    """The greedy text of a prompt does not depend on the server."""
    texts = {one.prompt: one.text for one in load.outcomes if one.text is not None}
    assert texts.keys() == set(prompts)
    assert all(one.text in (None, texts[one.prompt]) for one in load.outcomes)
