"""A cached prefix changes the time only: tokens and drafts are those of a cold engine."""

from typing import NamedTuple

import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

Z, PROMPT, OUTPUT = 4, 37, 12
TAILS = {"short": [5, 6, 7], "several chunks": list(range(40, 61))}
TEXT = PROMPT + OUTPUT  # tokens; the keys of the last one are not in the cache
CUTS = (1, Z, 3 * Z - 1, 3 * Z, 3 * Z + 1, PROMPT, TEXT - Z - 1, TEXT - Z, TEXT - 1, TEXT)
SAMPLINGS = {"greedy": dict(), "sampled": dict(temperature=0.8, seed=3)}


def config(**changes) -> EngineConfig:
    sizes = dict(num_draft=3, max_num_seqs=2, max_model_len=96, page_size=Z, prefill_chunk=8)
    return EngineConfig(**(sizes | changes))


class Answer(NamedTuple):
    tokens: list[int]
    drafts: list[list[int]]  # that each round verified
    accepted: list[int]  # per draft position
    rounds: int


def ask(engine: Engine, prompt: list[int], salt=(), **sampling) -> tuple[Answer, int]:
    """An answer, and the number of prompt tokens that were cached."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **sampling)
    request = engine.add_request(prompt, params, salt=salt)
    drafts = []
    while engine.has_work:
        for updated, _ in engine.step():
            if updated.last_round is not None:
                drafts.append(updated.last_round.drafts)
    engine.scheduler.check_integrity()
    answer = Answer(request.output, drafts, request.accepted_per_position, request.rounds)
    return answer, request.num_cached


def compare(engine: Engine, prompt: list[int], cuts, tails, sampling) -> tuple[list, list[Answer]]:
    """Asks for each cut of a text with each tail, cold and warm. Returns (cut, cached)s."""
    found, answers = [], []
    for cut in cuts:
        for tail in tails:
            engine.flush_prefix_cache()
            first, num_cached = ask(engine, prompt, **sampling)
            assert num_cached == 0
            asked = [*(prompt + first.tokens)[:cut], *tail]
            warm, num_cached = ask(engine, asked, **sampling)
            engine.flush_prefix_cache()
            cold, none = ask(engine, asked, **sampling)
            assert (warm, none) == (cold, 0), f"differs after a hit of {num_cached} tokens"
            found.append((cut, num_cached))
            answers.append(warm)
    return found, answers


def prompt_of(vocab_size: int) -> list[int]:
    return np.random.default_rng(5).integers(2, vocab_size, PROMPT).tolist()


@pytest.fixture(scope="module", params=["peagle, sampled drafts", "peagle", "eagle3", "none"])
def engine(request) -> Engine:
    method, _, sampled = request.param.partition(", ")
    head = None if method == "none" else tiny.head(method)
    drafts = dict(draft_sampling="sample") if sampled else {}
    return one_bucket(Engine(tiny.target(), head, config(**drafts)))


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_after_a_hit_are_those_of_a_cold_engine(engine, sampling):
    """Texts part before, at and after a page's end, and within the output."""
    prompt = prompt_of(tiny.TARGET.vocab_size)
    found, _ = compare(engine, prompt, CUTS, TAILS.values(), SAMPLINGS[sampling])
    # A page is found if the token after it is the same too.
    assert found == [(cut, (cut - 1) // Z * Z) for cut in CUTS for _ in TAILS]


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3", "windowed head", "dflash"])
@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name != "llama"])
def test_every_family_answers_alike_cold_and_warm(family, method):
    """With windows a text is found from where a ring, its own or a saved one, holds it."""
    windows = {"windowed head": dict(sliding_windows=(6, None))}.get(method, {})
    head = tiny.head("peagle" if windows else method, **windows) if method != "none" else None
    target = tiny.target(**tiny.FAMILIES[family])
    engine = one_bucket(Engine(target, head, config()))
    has_windows = bool(windows) or target.config.sliding_windows is not None
    prompt = prompt_of(tiny.TARGET.vocab_size)
    for sampling in SAMPLINGS.values():
        found, _ = compare(engine, prompt, CUTS[3:], [TAILS["short"]], sampling)
        wanted = {cut: (cut - 1) // Z * Z for cut in CUTS[3:]}
        if not has_windows:
            assert dict(found) == wanted
            continue
        assert all(num_cached <= wanted[cut] for cut, num_cached in found)
        assert dict(found)[TEXT] == TEXT - 1
        assert dict(found)[3 * Z] == 0


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["windowed head", "gpt_oss", "gemma4", "mistral"])
def test_windows_are_found_where_texts_part(family):
    """A beginning that others share is saved when the second text leaves it, and found by the
    third.

    The end of a prompt is saved with it: a template may drop the answer's reasoning from the next
    turn.
    """
    of_head = dict(sliding_windows=(6, None)) if family == "windowed head" else {}
    target = tiny.target(**tiny.FAMILIES.get(family, {}))
    engine = one_bucket(Engine(target, tiny.head("peagle", **of_head), config(max_num_seqs=1)))
    prompt, rings = prompt_of(tiny.TARGET.vocab_size), engine.scheduler.prefixes.saved_rings
    assert len(rings) == 64
    begin = prompt[:20]
    ends = [[5] * 9, [6] * 9, [7] * 21]
    for sampling in SAMPLINGS.values():
        engine.flush_prefix_cache()
        cold = []
        for end in ends:
            cold.append(ask(engine, begin + end, **sampling)[0])
            engine.flush_prefix_cache()
        answers = [ask(engine, begin + end, **sampling) for end in ends]
        assert [answer for answer, _ in answers] == cold
        assert [num_cached for _, num_cached in answers] == [0, 0, 16]
        next_turn, without = begin + ends[2] + [8, 9], len(begin + ends[2])
        warm, num_cached = ask(engine, next_turn, **sampling)
        assert num_cached == without // Z * Z
        engine.flush_prefix_cache()
        assert ask(engine, next_turn, **sampling) == (warm, 0)
    assert rings.num_restored > 0


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("windowed", [True, False])
def test_rows_of_one_call_share_a_beginning(windowed):
    sizes = config(max_num_seqs=4, prefill_rows=4)
    family = tiny.FAMILIES["mistral"] if windowed else {}
    engine = one_bucket(Engine(tiny.target(**family), tiny.head("peagle"), sizes))
    prompt = prompt_of(tiny.TARGET.vocab_size)
    prompts = [[*prompt[:33], id] for id in range(4)]
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    done = engine.generate(prompts, params)
    assert [one.cached for one in done] == [0, 32, 32, 32]
    alone = []
    for prompt in prompts:
        engine.flush_prefix_cache()
        alone += engine.generate([prompt], params)
    assert [one.tokens for one in done] == [one.tokens for one in alone]


@pytest.mark.sampled(1, slow=0)
def test_requests_with_other_salts_share_nothing_and_a_flush_takes_one_salt(engine):
    engine.flush_prefix_cache()
    prompt = prompt_of(tiny.TARGET.vocab_size)
    whole = (PROMPT - 1) // Z * Z
    num_cached = lambda *salt: ask(engine, prompt, salt)[1]
    assert [num_cached("a", None), num_cached("b", None), num_cached("a", "x")] == [0, 0, 0]
    assert [num_cached("a", None), num_cached("b", None), num_cached("a", "x")] == [whole] * 3
    assert engine.flush_prefix_cache(("a",)) == 2 * (TEXT - 1) // Z
    assert [num_cached("a", None), num_cached("b", None), num_cached("a", "x")] == [0, whole, 0]


@pytest.mark.slow
def test_an_engine_without_a_prefix_cache_computes_every_prompt():
    off = Engine(tiny.target(), None, config(num_draft=0, prefix_caching=False))
    prompt = prompt_of(tiny.TARGET.vocab_size)
    (first, _), (second, num_cached) = ask(one_bucket(off), prompt), ask(off, prompt)
    assert (first, num_cached) == (second, 0)
    assert not off.scheduler.pool.numbers


@pytest.mark.sampled(1, slow=0)
def test_a_request_that_does_not_read_the_cache_computes_its_whole_prompt(engine):
    prompt = prompt_of(tiny.TARGET.vocab_size)
    ask(engine, prompt)
    params = SamplingParams(max_tokens=1)
    (reads, does_not) = (engine.add_request(prompt, params) for _ in range(2))
    does_not.reads_prefix_cache = False
    while engine.has_work:
        engine.step()
    assert reads.num_cached > does_not.num_cached == 0
