"""Counts of rounds and drafts say what was emitted, whatever ends a text."""

from collections import Counter
from dataclasses import replace
from itertools import zip_longest

from hypothesis import example, given, settings
from hypothesis import strategies as st

from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.engine.host.stats import Acceptance
from tests.engine.fake_device import VOCAB
from tests.engine.fake_engine import (
    EOS,
    FakeEngine,
    check_finished,
    ends_in_seventeen,
    make_config,
)

J = 4


@st.composite
def asked(draw) -> dict:
    """A request: what `FakeEngine.add` takes, and after how many steps it comes and is aborted."""
    return dict(
        prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)),
        share=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),  # of the engine's drafts
        max_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, 60])),
        stop_ids=draw(st.sampled_from([(), (), (3, 9), (EOS, 5)])),
        ignore_eos=draw(st.booleans()),
        stop_checker=draw(st.sampled_from([None, None, ends_in_seventeen])),
        after=draw(st.integers(0, 12)),
        aborted=draw(st.sampled_from([None, None, None, 0, 3, 9])),
    )


def play(config, asks: list[dict], *, lag: int, seed: int) -> tuple[FakeEngine, list[Request]]:
    """Runs the requests to their ends."""
    engine = FakeEngine(config, lag=lag, seed=seed)
    todo = sorted(asks, key=lambda ask: ask["after"])
    ends: list[tuple[int, Request]] = []
    requests, now = [], 0
    while todo or ends or engine.scheduler.has_work:
        assert now < 5000, "no progress"
        while todo and todo[0]["after"] <= now:
            ask = dict(todo[0])
            after, aborted, share = ask.pop("after"), ask.pop("aborted"), ask.pop("share")
            ask["prompt"] = ask["prompt"][: config.max_model_len - 1]
            try:
                request = engine.add(num_draft=round(share * config.num_draft), **ask)
            except QueueFull:
                break
            requests.append(request)
            ends += [] if aborted is None else [(max(now, after) + aborted, request)]
            del todo[0]
        engine.dispatch()
        for end, request in [one for one in ends if one[0] <= now]:  # between dispatch and commit
            engine.abort(request)
            ends.remove((end, request))
        while len(engine.in_flight) > lag:
            engine.commit()
        now += 1
    engine.drain()
    return engine, requests


def ask(**changes) -> dict:
    """A long request with all drafts of its rounds."""
    fields = dict(prompt=[1] * 9, share=1.0, max_tokens=60, stop_ids=(), ignore_eos=True)
    return fields | dict(stop_checker=None, after=0, aborted=None) | changes


CROWD = [ask(prompt=[i] * 5) for i in range(1, 4)] + [
    ask(prompt=[4] * 5, aborted=3),
    ask(stop_ids=tuple(range(VOCAB))),
]
"""More than their pages hold: some are preempted, one stops, one is aborted, and the rest end by
length.
"""


def test_tokens_are_one_and_rounds_and_accepted_drafts(num_cases):
    seen: Counter = Counter()

    @settings(max_examples=num_cases("counts of requests", 150), deadline=None)
    @given(
        st.sampled_from([(0, 6, 40), (1, 4, 17), (3, 6, 24), (7, 4, 40)]),
        st.lists(asked(), min_size=1, max_size=10),
        st.sampled_from([0, 1]),
        st.integers(0, 2**16),
    )
    @example((7, 4, 40), CROWD, 1, 1)
    def check(sizes, asks, lag, seed):
        num_draft, B, max_len = sizes
        # Two pages more than the longest request, so that younger requests are preempted.
        pages = -(-max_len // 4) + 2
        config = make_config(J=num_draft, B=B, max_len=max_len, Z=4, P=pages, T=7, R=2)
        engine, requests = play(config, asks, lag=lag, seed=seed)
        for request in requests:
            check_finished(request, engine)
            seen[request.finish_reason] += 1
            seen["preempted"] += bool(request.preemptions and request.rounds)
            seen["on a draft"] += len(request.output) == request.rounds + request.accepted > 0
        drafting = Acceptance.of(request for request in requests if request.num_draft)
        sums = engine.scheduler.acceptance
        for field in ("per_position", "drafted_per_position"):
            pairs = zip_longest(getattr(sums, field), getattr(drafting, field), fillvalue=0)
            assert all(a == b for a, b in pairs)
        none = dict(per_position=(), drafted_per_position=())
        assert replace(sums, **none) == replace(drafting, **none)

    check()
    for what in ("stop", "length", "abort", "preempted", "on a draft"):
        assert seen[what] > 0, f"no request was like this: {what}"
