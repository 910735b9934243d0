"""An exception of the caller, or an interrupt, changes no text and loses no result."""

from dataclasses import replace

import pytest

from peagle_jax import Engine, SamplingParams
from peagle_jax.engine.device import transfer
from tests.programs import OneBucketConfig, small_engine

pytestmark = pytest.mark.usefixtures("programs_without_controls")

CONFIG = OneBucketConfig(
    num_draft=2, max_num_seqs=3, max_model_len=48, page_size=4, prefill_chunk=2
)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[7, 9, 11, 60], [3, 4, 7], [21]]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return [one.tokens for one in small_engine(CONFIG).generate(PROMPTS, PARAMS)]


def finish(engine: Engine, on_update=lambda request, tokens: None) -> None:
    for _ in range(100):
        if not engine.has_work:
            return
        engine.step(on_update)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rounds_per_call", [1, 3])
@pytest.mark.parametrize("raises_at", [0, 1, 4, 7])
def test_what_a_listener_raises_comes_after_the_commit(wanted, rounds_per_call, raises_at):
    engine = small_engine(replace(CONFIG, rounds_per_call=rounds_per_call))
    requests, calls = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS], []

    def listen(request, tokens):
        calls.append(tokens)
        if len(calls) == raises_at + 1:
            raise ArithmeticError("of the listener")

    with pytest.raises(ArithmeticError, match="of the listener"):
        finish(engine, listen)
    assert len(calls) == raises_at + 1  # it is not called again in that step
    finish(engine)
    assert [request.output for request in requests] == wanted
    engine.scheduler.check_integrity()


def test_requests_of_others_survive_a_call_of_generate_that_fails(wanted):
    engine = small_engine(CONFIG)
    mine = engine.add_request(PROMPTS[0], PARAMS)

    def listen(request, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPTS[1]], PARAMS, on_update=listen)
    finish(engine)
    assert mine.output == wanted[0]
    engine.scheduler.check_integrity()


def test_an_interrupt_while_a_result_is_awaited_loses_nothing(wanted, monkeypatch):
    engine = small_engine(CONFIG)
    requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()
    engine.step()
    result = type(engine._in_flight[0][1])
    with monkeypatch.context() as patch:
        patch.setattr(result, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finish(engine)
    assert [request.output for request in requests] == wanted


@pytest.mark.parametrize("name", ["round", "prefill", "upload", "schedule"])
def test_calls_that_cannot_be_dispatched_end_their_requests(wanted, monkeypatch, name):
    """Nothing of them stays: neither their pages, nor what was said of the device's plan."""
    engine = small_engine(CONFIG)
    engine.scheduler.idle_prefills = 1
    [one] = engine.generate([[5, 8, 13]], PARAMS)
    requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        if name == "schedule":
            patch.setattr(engine.scheduler, name, interrupted_after(engine.scheduler.schedule))
        elif name == "upload":
            patch.setattr(transfer, "_unpack_into", interrupted)
        else:
            patch.setattr(engine.programs, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    finish(engine)
    assert "abort" in [request.finish_reason for request in requests]
    engine.scheduler.check_integrity()
    again = [done.tokens for done in engine.generate(PROMPTS, PARAMS)]
    assert again == wanted
    assert engine.generate([[5, 8, 13]], PARAMS)[0].tokens == one.tokens


@pytest.mark.slow
def test_a_plan_that_was_not_uploaded_is_not_taken_for_the_devices(monkeypatch):
    """With one slot the same request has the same plan again."""
    engine = small_engine(replace(CONFIG, max_num_seqs=1))
    first, second = (engine.generate([prompt], PARAMS)[0].tokens for prompt in PROMPTS[:2])
    assert first != second
    engine.flush_prefix_cache()
    assert engine.generate([PROMPTS[0]], PARAMS)[0].tokens == first
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_unpack_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPTS[1]], PARAMS)
    assert engine.generate([PROMPTS[1]], PARAMS)[0].tokens == second


def interrupted(*args, **named):
    raise KeyboardInterrupt


def interrupted_after(function):
    """The function, which does its work once more and then is interrupted."""

    def call(*args, **named):
        function(*args, **named)
        raise KeyboardInterrupt

    return call
