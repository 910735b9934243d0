"""Many short requests in many slots, several rounds a call: each has the text of its solo run."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, SamplingParams
from peagle_jax.method.drafter import Proposal
from tests import tiny
from tests.programs import OneBucketConfig, one_bucket

SLOTS, REQUESTS, LONGEST = 256, 2000, 32
CONFIG = OneBucketConfig(
    num_draft=2,
    max_num_seqs=SLOTS,
    max_model_len=64,
    page_size=4,
    prefill_chunk=16,
    prefill_rows=64,
    num_pages=1200,
    rounds_per_call=4,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Followers:
    """Drafts the token that most often follows in some texts: now and then it is right."""

    follower: jax.Array  # [V] int32
    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        row = jnp.maximum(inputs.num_real - 1, 0)[:, None]
        tokens = [jnp.take_along_axis(inputs.tokens, row, axis=1)]
        for _ in range(self.num_draft):
            tokens.append(self.follower[tokens[-1]])
        return Proposal(jnp.concatenate(tokens[1:], axis=1), None), cache


def followers(texts: list[list[int]]) -> Followers:
    table = np.zeros(tiny.TARGET.vocab_size, np.int32)
    for (token, after), _ in reversed(Counter(p for t in texts for p in pairwise(t)).most_common()):
        table[token] = after
    return Followers(jnp.asarray(table), CONFIG.num_draft)


@pytest.mark.slow
def test_every_text_of_many_slots_equals_its_solo_run():
    """Requests come in bursts, 15 % are aborted, and pages are too few for all slots."""
    rng, target = random.Random(7), tiny.target(**tiny.ONE_LAYER)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(1, 20))] for _ in range(150)]
    params = lambda n: SamplingParams(max_tokens=n, ignore_eos=True)
    alone = replace(CONFIG, max_num_seqs=1, num_draft=0, num_pages=None, prefill_rows=1)
    solo = one_bucket(Engine(target, None, replace(alone, rounds_per_call=1)))
    texts = [solo.generate([prompt], params(LONGEST))[0].tokens for prompt in prompts]

    engine = one_bucket(Engine(target, None, CONFIG, drafter=followers(texts)))
    jobs = [(rng.randrange(len(prompts)), rng.randint(1, LONGEST)) for _ in range(REQUESTS)]
    requests, busiest = [], 0
    while len(requests) < REQUESTS or engine.has_work:
        for _ in range(min(rng.choice([0, 60, 200]), REQUESTS - len(requests))):
            number, length = jobs[len(requests)]
            requests.append(engine.add_request(prompts[number], params(length)))
        engine.step()
        running = [one for one in requests if not one.is_finished and one.output]
        busiest = max(busiest, len(running))
        for one in running:
            if rng.random() < 0.02:
                engine.abort(one)
        engine.scheduler.check_integrity()

    ends = Counter(one.finish_reason for one in requests)
    assert ends["abort"] > 50
    assert ends["length"] > 1500
    assert busiest > 200
    assert sum(one.preemptions for one in requests) > 10
    assert 0 < sum(one.accepted for one in requests) < sum(one.drafted for one in requests)
    for one, (number, length) in zip(requests, jobs, strict=True):
        wanted = texts[number][:length]
        kept = len(one.output) if one.finish_reason == "abort" else length
        assert one.output == wanted[:kept], one.id
    assert engine.scheduler.pool.num_free == engine.config.total_pages - 1
