"""Long answers are made in turns of the event loop."""

import asyncio
import json
from collections.abc import Awaitable

import pytest

from peagle_jax.engine.host.request import PromptLogprob
from serving import turns
from serving.http.errors import dump, dump_in_turns
from serving.http.reports import CompletionLogprobs, prompt_logprobs
from serving.rpc import peagle, vllm
from serving.turns import Later

LONG = 10 * turns.PIECE + 3
PROMPT = list(range(LONG))
SCORES = [None, *[PromptLogprob(-0.5, [(7, -0.25), (8, -1.5)], 2)] * (LONG - 1)]


def turns_during[T](work: Awaitable[T]) -> tuple[T, int]:
    """The result of `work`, and how many turns the event loop had meanwhile."""

    async def run():
        loop, count = asyncio.get_running_loop(), 0

        def turn():
            nonlocal count, next_turn
            count += 1
            next_turn = loop.call_soon(turn)

        next_turn = loop.call_soon(turn)
        try:
            return await work, count
        finally:
            next_turn.cancel()

    return asyncio.run(run())


def numbers(count: int) -> Later[int]:
    return Later((i for i in range(count)), count)


@pytest.mark.parametrize("count", [0, 1, turns.PIECE, turns.PIECE + 1, LONG])
def test_lists_are_encoded_as_any_others(count):
    make = lambda some: {
        "a": [{"b": some(count), "c": some(2)}, some(3), [], {}, "é\ud800"],
        "d": None,
    }
    plain = dump(make(lambda n: list(range(n))))
    found, num_turns = turns_during(dump_in_turns(make(numbers)))
    assert found == plain
    if count > turns.PIECE:
        assert num_turns >= count // turns.PIECE
    assert dump({"short": numbers(2)}) == b'{"short":[0,1]}'


def test_only_these_lists_are_encoded_later():
    with pytest.raises(TypeError, match="set cannot be encoded as JSON"):
        dump({"a": {1}})


async def _echoed() -> bytes:
    return await dump_in_turns(CompletionLogprobs(None).of(PROMPT, SCORES, 1))


async def _by_id() -> bytes:
    return await dump_in_turns(prompt_logprobs(None, PROMPT, SCORES, 2))


@pytest.mark.parametrize("work", [_echoed, _by_id])
def test_logprobs_of_a_long_prompt_leave_turns_to_others_over_http(work):
    found, num_turns = turns_during(work())
    assert num_turns >= LONG // turns.PIECE
    content = json.loads(found)
    if work is _by_id:
        assert content[0] is None
        assert content[LONG - 1]["7"]["rank"] == 1
        assert len(content) == LONG
    else:
        assert all(len(content[name]) == LONG for name in content)
        assert len(content["top_logprobs"][LONG - 1]) == 2, "one alternative and the token itself"


async def _of_peagle() -> list:
    return [one async for some in peagle._prompt_logprobs(SCORES) for one in some]


def test_logprobs_of_a_long_prompt_leave_turns_to_others_over_grpc():
    found, num_turns = turns_during(_of_peagle())
    assert len(found) == LONG - 1
    assert num_turns >= LONG // turns.PIECE
    found, num_turns = turns_during(vllm._prompt_logprobs(PROMPT, SCORES))
    assert len(found.token_logprobs) == len(found.top_logprobs) == LONG
    assert num_turns >= LONG // turns.PIECE
