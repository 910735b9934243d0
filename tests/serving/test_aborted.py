"""Requests that end before their text does: each API says so, and the counters know of them."""

import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from serving.app import _limits
from serving.engines import engine_of, sized_config
from serving.errors import Code, ServiceError
from serving.settings import Settings
from tests import tiny
from tests.serving.test_metrics import moved, scrape
from tests.waiting import LIMIT, eventually

LONG = dict(model="tiny", temperature=0, stream=False)
TALK = [{"role": "user", "content": "abc"}]


@pytest.fixture
def answer(server, http, pace):
    """The answer to a request that `Frontend.abort` ends while it runs."""

    def ask(path: str, body: dict) -> httpx.Response:
        found = []
        named = body | {"request_id": "mine"}
        thread = threading.Thread(target=lambda: found.append(http.post(path, json=LONG | named)))
        thread.start()
        running = lambda: server.engine.scheduler.num_running
        eventually(lambda: server.call(running) and pace.is_waiting.is_set())
        pace.release(2)
        assert server.call(server.frontend.abort, "mine")
        pace.release(10)
        thread.join(LIMIT)
        return found[0]

    return ask


def test_a_completion_says_abort(answer):
    made = answer("/v1/completions", dict(prompt="abc", max_tokens=80))
    assert made.json()["choices"][0]["finish_reason"] == "abort"


def test_a_response_is_cancelled(answer):
    made = answer("/v1/responses", dict(input="abc", max_output_tokens=80)).json()
    assert (made["status"], made["error"]["message"]) == ("cancelled", "the request was aborted")
    assert made["incomplete_details"] is None


def test_the_events_of_a_response_end_with_failed(answer):
    made = answer("/v1/responses", dict(input="abc", max_output_tokens=80, stream=True))
    last = [line for line in made.text.splitlines() if line.startswith("event: ")][-1]
    assert last == "event: response.failed"
    assert '"status":"cancelled"' in made.text.replace(" ", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_ends_with_an_error(answer, stream):
    """Anthropic's API has no reason of an end that says that the text is not complete."""
    made = answer("/v1/messages", dict(messages=TALK, max_tokens=80, stream=stream))
    assert made.status_code == (200 if stream else 400)
    assert "the request was aborted" in made.text
    assert "end_turn" not in made.text
    assert "message_stop" not in made.text


def test_a_client_that_leaves_counts_as_abort(server, pace):
    before = scrape(server)
    body = dict(prompt="abc", max_tokens=80, n=3, ignore_eos=True, temperature=1)
    pace.release(2)
    content = LONG | body | {"stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=content) as made:
        next(made.iter_lines())
    eventually(lambda: server.call(lambda: server.frontend.admission.num_open == 0))
    pace.release(100)
    assert moved(server, before)["vllm:request_success_total{abort}"] == 3


class Ended:
    """A stream of one sequence that has ended, as `Metrics.ended` reads it."""

    cached_tokens, first_token, finish_reasons = 0, None, ()

    def __init__(self, code: Code, end: float):
        self.code, self.end = code, end
        self.error = None if code is Code.OK else ServiceError(code, "", retry_after=1.0)
        self.ask = SimpleNamespace(protocol="http", prompt=[1, 2, 3])


def test_refusals_of_a_full_queue_neither_hurry_retries_nor_count_prompts(server):
    """A place becomes free every 8 seconds, however many requests were refused meanwhile."""
    metrics = server.frontend.metrics
    before, now = scrape(server), time.monotonic()
    metrics._ends.clear()
    for second in (0, 8):
        metrics.ended(Ended(Code.OK, now + second))
        metrics.ended(Ended(Code.RESOURCE_EXHAUSTED, now + second))
    assert metrics.seconds_per_request() == pytest.approx(8)
    metrics._ends.clear()  # other tests share the server
    assert moved(server, before)["vllm:prompt_tokens_total"] == 6


def test_requests_without_a_seed_are_drawn_anew_after_each_start():
    settings, target = Settings(max_num_seqs=2, max_model_len=64), tiny.target(**tiny.ONE_LAYER)
    config = sized_config(settings)
    first, second = (next(engine_of(settings, config, target, None).numbers) for _ in range(2))
    assert first != second
    assert 0 <= min(first, second) <= max(first, second) < 2**62


def test_more_sequences_than_places_are_refused_by_their_number():
    """They would be refused for a full queue, again and again."""
    settings = Settings(model=None, max_num_seqs=2, max_waiting=3)
    assert _limits(settings).max_n == 5
    assert _limits(Settings(model=None)).max_n == 16
