"""Controls, grammars, logprobs, cached prefixes and changing K in one batch keep every text."""

import random
from collections import Counter
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.oracle import RandomTimes
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import round_shapes
from peagle_jax.engine.host import k_by_load
from peagle_jax.method.drafter import Proposal
from peagle_jax.method.sampling import draft_keys, sample_rows
from peagle_jax.structured import Structured
from tests import tiny
from tests.programs import OneBucketConfig
from tests.test_losslessness import OracleDrafter
from tests.vocabularies import END, json_tokenizer

J, MAX_TOKENS = 4, 24
SIZES = dict(
    max_num_seqs=5,
    max_model_len=80,
    page_size=4,
    prefill_chunk=8,
    prefill_rows=2,
    max_logprobs=2,
    prompt_logprobs=True,
    max_waiting=999,
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FEATURES = (
    {},
    dict(repetition_penalty=2.5),
    dict(frequency_penalty=1.5, presence_penalty=0.5),
    dict(allowed_token_ids=tuple(range(30, 40)), presence_penalty=1.0),
    dict(structured=Structured.json_schema(SCHEMA)),
    dict(structured=Structured.json_schema(SCHEMA), frequency_penalty=1.0),
    dict(logprobs=2, prompt_logprobs=1),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UniformDrafter:
    """Draws drafts from the uniform distribution: those for one position of a text are equal."""

    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        positions = (inputs.start + inputs.num_real)[:, None] + 1 + jnp.arange(self.num_draft)
        q = jnp.full((*positions.shape, target.config.vocab_size), 1 / target.config.vocab_size)
        keys = draft_keys(inputs.keys, positions, jnp.zeros_like(inputs.start))
        return Proposal(sample_rows(q, keys), q), cache

    def absorb(self, target, inputs, cache):
        return cache


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_requests_with_any_features_keep_the_text_of_plain_decoding(
    family, monkeypatch, num_cases, tmp_path
):
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    tokenizer = json_tokenizer(tmp_path)
    layers = tiny.ONE_LAYER if family == "llama" else {}  # gemma4 has a window in some layers only
    changes = tiny.FAMILIES[family] | layers
    target = tiny.target(**changes, eos_ids=(tokenizer.added[END],))
    config = EngineConfig(num_draft=0, prefix_caching=False, **SIZES)
    plain = Engine(target, None, config, tokenizer=tokenizer)
    plain.warm_up(sizes=[5])
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(0, 95, n).tolist() for n in (1, 9, 17, 30)]
    prompts.append([*prompts[3][:16], 3, 4, 5])
    jobs = [(prompt, features) for prompt in prompts for features in FEATURES]
    params = [SamplingParams(max_tokens=MAX_TOKENS, **features) for _, features in jobs]
    wanted = plain.generate([prompt for prompt, _ in jobs], params)
    table = np.zeros((len(jobs), 2 * 80), np.int32)
    for row, done in zip(table, wanted, strict=True):
        row[: len(done.prompt + done.tokens)] = done.prompt + done.tokens
    drafter = OracleDrafter(jnp.asarray(table), jnp.asarray(0), J)
    config = OneBucketConfig(
        num_draft=J, num_pages=34, adaptive="load", greedy_rounds=True, **SIZES
    )
    engine = Engine(target, None, config, tokenizer=tokenizer, drafter=drafter, times=RandomTimes())
    engine.warm_up()
    seen: Counter = Counter()
    for seed in range(num_cases("walks over requests with any features", 4)):
        rng = random.Random(seed)
        todo, requests = [rng.randrange(len(jobs)) for _ in range(50)], []
        while todo or engine.has_work:
            while todo and rng.random() < 0.4:
                job = todo.pop()
                rules = dict(salt=rng.choice([(), ("a",)]), priority=rng.choice([0, 0, 1]))
                requests.append(
                    engine.add_request(jobs[job][0], params[job], request_id=job, **rules)
                )
            engine.step()
            if requests and rng.random() < 0.03:
                engine.abort(rng.choice(requests[-8:]))
            if rng.random() < 0.02:
                engine.flush_prefix_cache(("a",))
            engine.scheduler.check_integrity()
        for request in requests:
            done = wanted[request.id]
            seen["cached"] += request.num_cached > 0
            seen["preempted"] += request.preemptions > 0
            seen["accepted"] += request.accepted
            assert request.output == done.tokens[: len(request.output)], jobs[request.id]
            if request.finish_reason != "abort":
                assert (request.finish_reason, len(request.output)) == (
                    done.finish_reason,
                    len(done.tokens),
                )
    assert seen["preempted"] > 0
    assert seen["accepted"] > 100
    assert seen["cached"] > 0 or family == "gemma4"


class FastestAt(RandomTimes):
    """Rounds of one K are chosen wherever the engine may choose."""

    def __init__(self, fastest: int):
        super().__init__()
        self.fastest = fastest

    def seconds(self, size, drafts):
        return {k: 0.01 if k == self.fastest else 1.0 for k in drafts}


@pytest.mark.slow
def test_a_seed_repeats_a_text_beside_rounds_without_drafts_and_forced_ones(monkeypatch, tmp_path):
    """Elsewhere a round without drafts, or with drafts of another source, moves the seed on."""
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    monkeypatch.setattr(round_shapes, "candidates", lambda most, size, platform: (0, J))
    tokenizer = json_tokenizer(tmp_path)
    config = OneBucketConfig(num_draft=J, adaptive="load", draft_sampling="sample", **SIZES)
    target = tiny.target(**tiny.ONE_LAYER, eos_ids=(tokenizer.added[END],))
    times, drafter = FastestAt(J), UniformDrafter(J)
    engine = Engine(target, None, config, tokenizer=tokenizer, drafter=drafter, times=times)
    engine.warm_up()
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    seeded = SamplingParams(max_tokens=24, ignore_eos=True, temperature=4.0, seed=5)
    forced = SamplingParams(max_tokens=60, structured=Structured.choice(["[1, 2, 3]" * 5]))

    def text(*neighbours: SamplingParams) -> list[int]:
        """Of the seeded request, which joins others that decode plainly."""
        others = [engine.add_request([7, 8, 9 + i], one) for i, one in enumerate(neighbours)]
        while not all(len(one.output) > 8 for one in others):
            engine.step()
        if others:
            assert engine.scheduler.num_draft_at(5) == 0
        (done,) = engine.generate([[3, 4, 5]], seeded)
        assert not any(one.error for one in others)
        assert all(one.accepted > 0 for one in others if one.params is forced)
        return done.tokens

    alone = text()
    times.fastest = 0
    assert text(long, long, long) == alone
    assert text(long, forced, forced) == alone
