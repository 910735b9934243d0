"""Constrained and free requests in any mix, against `FakeDevice`, which obeys the masks."""

import functools
import random
from collections import Counter

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from peagle_jax.engine.host.calls import Calls
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.engine.structured.grammar import Matcher
from peagle_jax.engine.structured.mask_threads import MaskThreads
from peagle_jax.method.plan import mask_words
from tests.engine.fake_device import VOCAB
from tests.engine.fake_engine import EOS, FakeEngine, check_finished, make_config

TEXT = "".join(chr(ord("0") + token) for token in range(VOCAB - 1))
"""Token i is one character; the last token ends the text."""
GRAMMARS = (
    'start: "ABC" /[0-9]{1,6}/ "DEF" /[a-f]*/',
    "start: /[0-9A-F]+/",
    'start: "[" item ("," item)* "]"\nitem: "@@@@" | /[G-K]{2}/ | "[" item "]"',
    'start: "CONSTANT" | "CONSTABLE" | "C"',
    "start: /(.|\\n)*/",
)
CONFIGS = {
    "plain": make_config(J=0, B=5, max_len=40, Z=4, P=14, T=64, R=1),
    "tiny pool": make_config(J=3, B=6, max_len=48, Z=4, P=16, T=7, R=1),
    "long drafts": make_config(J=7, B=6, max_len=60, Z=8, P=20, T=8, R=3),
    "changing K": make_config(J=5, B=6, max_len=48, Z=4, P=20, T=7, R=1),
    "roomy": make_config(J=4, B=7, max_len=64, Z=16, P=None, T=16, R=2),
}


class _Alphabet:
    """`TEXT` in the form of llguidance's `TokenizerWrapper`."""

    eos_token_id, bos_token_id, special_token_ids = EOS, None, (EOS,)
    tokens = (*(letter.encode() for letter in TEXT), b"<|end|>")

    def __call__(self, text: str) -> list[int]:
        return [TEXT.index(letter) for letter in text]


VOCABULARY = LLTokenizer(TokenizerWrapper(_Alphabet()), eos_token=[EOS])
THREADS = MaskThreads(2)


@functools.cache
def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matcher_of(grammar: str) -> Matcher:
    return Matcher(compiled(grammar).deep_copy(), THREADS, (EOS,), mask_words(VOCAB))


def text_of(tokens: list[int]) -> str:
    return "".join(TEXT[token] for token in tokens if token != EOS)


def check_rule(engine: FakeEngine, calls: Calls) -> int:
    """A constrained request has one call in flight at most, and none goes while another's round
    runs.

    Returns how many constrained rows the round has.
    """
    constrained = [r for r in engine.scheduler.active if r.matcher is not None]
    rows = [] if calls.decode is None else [r for r in calls.decode.requests if r and r.matcher]
    in_flight = [r for r in constrained if r.rounds_in_flight]
    assert all(r.in_flight <= 1 for r in constrained)
    assert not rows or set(rows) == set(in_flight), "constrained requests in two rounds"
    has_mask = calls.decode is not None and calls.decode.mask is not None
    assert has_mask == bool(rows), "a mask is sent for constrained rows only"
    return len(rows)


def add_random(engine: FakeEngine, rng: random.Random) -> tuple[Request, str | None] | None:
    grammar = rng.choice([None, *GRAMMARS])
    size = rng.choice([rng.randint(1, 8), rng.randint(1, engine.config.max_model_len - 1)])
    try:
        request = engine.add(
            [rng.randrange(VOCAB) for _ in range(size)],
            num_draft=rng.randint(0, engine.config.num_draft),
            max_tokens=rng.choice([1, 2, rng.randint(1, 70)]),
            stop_ids=rng.choice([(), (), (3,)]),
            ignore_eos=rng.random() < 0.3,
            matcher=grammar and matcher_of(grammar),
        )
    except QueueFull:
        return None
    return request, grammar


@pytest.mark.sampled(5, slow=5)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_request_gets_the_text_of_its_own_grammar_in_any_mix(name, lag, num_cases):
    rng = random.Random(1)
    engine = FakeEngine(CONFIGS[name], lag=lag, seed=1)
    if name == "changing K":
        engine.vary_k(rng)
    added: list[tuple[Request, str | None]] = []
    seen: Counter = Counter()
    for _ in range(num_cases("rounds of constrained requests in the scheduler", 250, least=250)):
        while rng.random() < 0.4:
            one = add_random(engine, rng)
            added += [one] if one else []
        calls = engine.dispatch()
        seen["rows"] += check_rule(engine, calls)
        if calls.decode is not None:
            seen["forced"] += int((calls.decode.plan.forced >= 0).sum())
        if engine.scheduler.active and rng.random() < 0.1:
            engine.abort(rng.choice(engine.scheduler.active))
        while len(engine.in_flight) > lag:
            engine.commit()
    engine.drain()
    for request, grammar in added:
        check_finished(request, engine, grammar and matcher_of(grammar))
        if grammar is not None:
            seen[request.finish_reason] += 1
            seen["preempted"] += bool(request.preemptions and request.output)
            matcher = matcher_of(grammar)
            matcher.consume(request.output)
            assert matcher.error is None, text_of(request.output)
            if request.finish_reason == "stop" and request.stop_reason == EOS:
                assert matcher.is_complete
    assert min(seen["stop"], seen["length"], seen["abort"], seen["rows"]) > 0
    assert seen["preempted"] or name == "roomy"
    assert seen["forced"] or not engine.config.num_draft


def test_free_requests_keep_their_overlap_beside_constrained_ones():
    """Free ones go in every round, constrained ones in every second."""
    engine = FakeEngine(make_config(J=2, B=4, max_len=200, Z=8, P=None, T=16, R=4))
    free = [engine.add([i], max_tokens=99, ignore_eos=True) for i in (1, 2)]
    bound = [engine.add([i], max_tokens=99, matcher=matcher_of(GRAMMARS[4])) for i in (3, 4)]
    engine.step()
    rounds = []
    for _ in range(12):
        calls = engine.dispatch()
        rounds.append([r for r in calls.decode.requests if r is not None and not r.is_finished])
        engine.commit()
    assert all(set(free) <= set(rows) for rows in rounds)
    with_bound = [set(bound) & set(rows) for rows in rounds]
    assert [bool(rows) for rows in with_bound[1:]] in (
        [i % 2 == k for i in range(11)] for k in (0, 1)
    )
    assert all(rows in (set(), set(bound)) for rows in with_bound)


def test_a_stream_of_new_constrained_requests_does_not_hold_the_running_ones():
    """Prefills of new ones arrive at every step; the rounds of the first go on at every second."""
    engine = FakeEngine(make_config(J=2, B=8, max_len=200, Z=8, P=None, T=16, R=1))
    first = engine.add([5], max_tokens=99, matcher=matcher_of(GRAMMARS[4]), ignore_eos=True)
    engine.step()
    rounds = 0
    for number in range(7):
        engine.add([number], max_tokens=99, matcher=matcher_of(GRAMMARS[4]), ignore_eos=True)
        calls = engine.dispatch()
        rounds += calls.decode is not None and first in calls.decode.requests
        engine.commit()
    assert rounds >= 3
