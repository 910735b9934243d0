"""K chosen at run time: texts stay the target's while K changes, and nothing compiles."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from bench.oracle import RandomTimes
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import round_shapes, round_timer
from peagle_jax.engine.device.stored_times import StoredTimes
from peagle_jax.engine.host import k_by_load
from peagle_jax.engine.host.calls import DecodeCall, RoundShape
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.round_times import RoundTimes
from tests import tiny
from tests.programs import OneBucketConfig
from tests.test_families import LENGTH, MAX_TOKENS, naive, prompts, target
from tests.test_losslessness import OracleDrafter

pytestmark = pytest.mark.usefixtures("programs_without_controls")

DRAFTS = (0, 2, 4)


def walk(
    engine: Engine, rng: random.Random, step: Callable[[Engine, random.Random], int]
) -> tuple[list[Request], set[tuple[int, int]]]:
    """Requests of mixed lengths that come, end and are aborted while K changes in every round.

    `step` runs a step of the engine and returns the K of its round.

    Returns the requests, whose ids are (prompt, number), and the pairs of K that followed each
    other.
    """
    texts, most = prompts(), engine.config.num_draft
    todo = [(i % len(texts), i) for i in range(2 * len(texts))]
    requests: list[Request] = []
    pairs, before, limit = set(), None, 2000
    while todo or engine.has_work:
        limit -= 1
        assert limit > 0, "no progress"
        while todo and rng.random() < 0.5:
            prompt, number = todo.pop()
            params = SamplingParams(
                max_tokens=rng.choice([MAX_TOKENS, rng.randint(1, MAX_TOKENS)]),
                num_speculative_tokens=rng.choice([None, None, None, 0, 1, most]),
            )
            request = engine.add_request(texts[prompt], params, request_id=(prompt, number))
            requests.append(request)
        num_draft = step(engine, rng)
        pairs.add((before, num_draft))
        before = num_draft
        if rng.random() < 0.04 and requests:
            engine.abort(rng.choice(requests))
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.config.total_pages - 1
    return requests, pairs


def oracle(family: str, num_draft: int) -> OracleDrafter:
    """Proposes what the target says."""
    table = np.zeros((len(prompts()), 2 * LENGTH), np.int32)
    for row, prompt, output in zip(table, prompts(), naive(family), strict=True):
        row[: len(prompt) + len(output)] = prompt + output
    return OracleDrafter(jnp.asarray(table), jnp.asarray(0), num_draft)


@pytest.fixture
def three_k(monkeypatch):
    """Rounds of K = 0, 2 and 4 compile, and each round decides."""
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    monkeypatch.setattr(round_shapes, "candidates", lambda most, size, platform: DRAFTS)


def step(engine: Engine, rng: random.Random) -> int | None:
    """One step. Returns the K of its round."""
    engine.step()
    return next((c.num_draft for c, *_ in engine._in_flight if isinstance(c, DecodeCall)), None)


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "oracle"), *zip(tiny.FAMILIES, itertools.cycle(("peagle", "eagle3")))],
)
def test_output_is_unchanged_by_any_choice_of_k(family, method, three_k, num_cases):
    config = OneBucketConfig(
        num_draft=4,
        adaptive="load",
        max_num_seqs=6,
        num_pages=50,
        max_model_len=LENGTH,
        page_size=4,
        prefill_chunk=16,
        prefill_rows=2,
    )
    # Random heads are hardly ever right.
    head = None if method == "oracle" else tiny.head(method)
    drafter = oracle(family, 4) if method == "oracle" else None
    engine = Engine(target(family), head, config, drafter=drafter, times=RandomTimes())
    engine.warm_up()
    assert engine.programs.rounds == engine.scheduler.rounds == {6: DRAFTS}
    check_walks(engine, family, step, num_cases("walks over a K chosen at run time", 3))
    assert engine.policy.num_changes > 50
    counts = engine.scheduler.acceptance
    assert counts.accepted > 0.3 * counts.drafted if method == "oracle" else counts.drafted > 0


def check_texts(requests: list[Request], family: str) -> None:
    """Each request of a walk has the text of plain decoding, up to its end or abort."""
    for request in requests:
        text = naive(family)[request.id[0]]
        if request.finish_reason != "abort":
            text = text[: request.params.max_tokens]
            assert request.output == text
        assert request.output == text[: len(request.output)]
        assert request.accepted <= request.drafted <= request.rounds * request.num_draft


def check_walks(
    engine: Engine, family: str, step: Callable[[Engine, random.Random], int], count: int
) -> None:
    """`count` walks over K = 0, 2 and 4: all texts are those of plain decoding."""
    num_programs, pairs = engine.programs.num_compiled, set()
    assert num_programs == engine.num_programs
    for seed in range(count):
        requests, some = walk(engine, random.Random(seed), step)
        pairs |= some
        check_texts(requests, family)
    assert {(a, b) for a in (0, 2, 4) for b in (0, 2, 4)} <= pairs
    assert engine.scheduler.num_preemptions > 0
    assert engine.programs.num_compiled == num_programs


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("own", [1, 3])
def test_every_call_makes_the_drafts_that_the_engine_counts(own):
    """A drafter made for another K: each draft that is verified is a fresh one, and right."""
    config = OneBucketConfig(num_draft=2, max_num_seqs=2, max_model_len=LENGTH)
    engine = Engine(target("llama"), None, config, drafter=oracle("llama", own))
    params = [SamplingParams(max_tokens=1 + 3 * 3), SamplingParams(max_tokens=1 + 3 * 2)]
    done = engine.generate(prompts()[:2], params)
    assert [(c.rounds, c.drafted, c.accepted) for c in done] == [(3, 6, 6), (2, 4, 4)]


def one_page_config(rows: int) -> OneBucketConfig:
    """All positions are in one page, so the plans of all rounds are equal."""
    return OneBucketConfig(
        num_draft=4,
        adaptive="load",
        max_num_seqs=rows,
        max_model_len=LENGTH,
        page_size=LENGTH,
        prefill_chunk=LENGTH,
    )


def make_engine(times: RoundTimes | None, **changes) -> Engine:
    config = replace(one_page_config(2), **changes)
    return Engine(target("llama"), None, config, drafter=oracle("llama", 4), times=times)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_and_a_start_takes_only_the_first_programs(
    three_k, monkeypatch
):
    monkeypatch.setattr(StoredTimes, "load", lambda self: {})  # of an earlier run of this test
    engine = make_engine(None, max_logprobs=1)  # no other test compiles for it
    assert engine.num_programs == 5
    engine.warm_up(sizes=engine.config.batch_buckets)
    assert engine.programs.num_compiled == 3
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = [naive("llama")[i][:30] for i in (0, 1)]
    outputs = lambda: [c.tokens for c in engine.generate(prompts()[:2], params)]
    assert outputs() == texts  # K = 4, and no idle rounds delay it
    assert engine._timer.times.idle == {}
    while engine.compile_next():
        assert outputs() == texts
    assert engine.programs.num_compiled == 5
    while engine.time_idle_round():
        pass
    assert set(engine._timer.times.idle) == {RoundShape(2, k) for k in DRAFTS}
    assert outputs() == texts
    assert engine.programs.num_compiled == 5


def test_a_warm_start_has_the_times_of_the_one_before(three_k, monkeypatch, tmp_path):
    given = {RoundShape(2, k): 1.0 + k for k in DRAFTS}
    cold = make_engine(None)
    cold.programs.stored_times.path = tmp_path / "times" / "one.json"
    cold.programs.stored_times.save(given)
    warm = make_engine(None)
    monkeypatch.setattr(warm.programs, "stored_times", cold.programs.stored_times)
    timer = round_timer.RoundTimer(warm.programs, None)
    assert timer.times.idle == given
    assert not timer.has_idle_run()


def test_an_engine_without_a_drafter_has_nothing_to_choose():
    engine = Engine(target("llama"), None, EngineConfig(adaptive="load", max_model_len=LENGTH))
    assert (engine.config.adaptive, engine.policy) == ("off", None)
    assert {shape.num_draft for shape in engine.programs.shapes} == {0}
