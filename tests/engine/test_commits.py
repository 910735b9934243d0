"""The rounds of one call, committed a request at a time, change what they do one by one."""

import random
from dataclasses import replace

import numpy as np

from bench.oracle import RandomTimes
from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import DecodeCall, RoundShape
from peagle_jax.engine.host.k_by_load import LoadPolicy
from peagle_jax.engine.host.request import RequestState
from peagle_jax.engine.host.scheduler import Scheduler
from tests.engine.fake_engine import EOS, ends_in_seventeen, make_request

B, J, N = 3, 4, 3
SIZES = dict(num_draft=J, max_num_seqs=B, max_model_len=64, page_size=4, prefill_rows=B)
CONFIG = EngineConfig(rounds_per_call=N, num_pages=60, **SIZES)


def one_by_one(scheduler: Scheduler, call: DecodeCall, tokens, count, drafts) -> list:
    updates, rows, record = [], [], scheduler.policy.record
    # The rounds of a call are one measurement of acceptance.
    scheduler.policy.record = rows.extend
    for index in range(N):
        one = replace(call, drafted=call.drafted_again) if index else call
        updates += scheduler.commit_decode(one, tokens[index], count[index], drafts[index])
    scheduler.policy.record = record
    record(rows)
    return updates


def drawn_results(rng: np.random.Generator, call: DecodeCall) -> tuple:
    """Tokens, counts and drafts of a call; now and then logits are not finite."""
    drafted, K = [call.drafted, *[call.drafted_again] * (N - 1)], call.num_draft
    accepted = rng.integers(0, np.array([[*some, *[0] * B][:B] for some in drafted]) + 1)
    count = np.where(rng.random((N, B)) < 0.03, -1 - accepted, accepted + 1)
    return rng.integers(0, 60, (N, B, K + 1)), count, rng.integers(0, 60, (N, B, K))


def drawn_requests(rng: random.Random) -> list:
    fields = lambda: dict(
        max_tokens=rng.randint(1, 60),
        ignore_eos=rng.random() < 0.5,
        stop_ids=tuple(rng.sample(range(60), rng.choice([0, 0, 2]))),
        stop_checker=rng.choice([None, None, ends_in_seventeen]),
    )
    return [([1] * rng.randint(1, 30), rng.randint(0, J), fields()) for _ in range(8)]


def walk(seed: int, commit) -> tuple:
    """What a scheduler does with random requests and results; `commit` takes its calls."""
    rng, numpy_rng = random.Random(seed), np.random.default_rng(seed)
    policy = LoadPolicy(J, RandomTimes())
    policy.decide_every = 2
    scheduler = Scheduler(CONFIG, eos_ids=[EOS], policy=policy)
    # Calls of K = 2 have one round.
    scheduler.rounds = dict.fromkeys(CONFIG.batch_buckets, (2, J))
    scheduler.repeated = {RoundShape(size, J) for size in CONFIG.batch_buckets}
    requests, seen = [], []
    for prompt, num_draft, fields in drawn_requests(rng):
        requests.append(make_request(len(requests), prompt, num_draft, **fields))
        scheduler.add(requests[-1])
    in_flight = []
    while scheduler.has_work or in_flight:
        calls, before = scheduler.schedule(), in_flight
        in_flight = [*calls.prefills, *([] if calls.decode is None else [calls.decode])]
        for call in before:
            if isinstance(call, DecodeCall):
                results = drawn_results(numpy_rng, call)
                if call.repeat == N:
                    updates = commit(scheduler, call, *results)
                else:
                    updates = scheduler.commit_decode(call, *(each[0] for each in results))
                for request, tokens in updates:
                    seen.append((request.id, tokens))
            else:
                drafts = numpy_rng.integers(0, 60, (B, J))
                tokens, ones = numpy_rng.integers(0, 60, (B, 1)), np.ones(B, int)
                seen += [(r.id, t) for r, t in scheduler.commit_prefill(call, tokens, ones, drafts)]
        scheduler.check_integrity()
        for one in scheduler.active:
            if one.state is RequestState.RUNNING:
                assert len(one.chain) == (one.num_tokens - 1) // CONFIG.page_size, "not published"
        if rng.random() < 0.05:
            scheduler.abort(rng.choice(requests))
    assert all(request.state is RequestState.FINISHED for request in requests)
    texts = [[tokens for owner, tokens in seen if owner == one.id] for one in requests]
    ends = [(one.output, one.finish_reason, one.stop_reason, one.error) for one in requests]
    counts = [(one.rounds, one.accepted_per_position, one.last_round) for one in requests]
    return texts, ends, counts, scheduler.acceptance, policy.shares


def test_the_order_of_commits_changes_nothing(num_cases):
    for seed in range(num_cases("walks over calls of several rounds", 25)):
        assert walk(seed, Scheduler.commit_rounds) == walk(seed, one_by_one), seed
