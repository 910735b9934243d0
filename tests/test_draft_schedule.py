"""K by batch size: texts stay the target's own while K changes between any two rounds."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.draft_schedule import num_draft_at, parse
from peagle_jax.engine.device import transfer
from peagle_jax.engine.host.request import Request
from peagle_jax.method.drafter import Proposal
from peagle_jax.method.plan import DecodePlan, PrefillPlan
from peagle_jax.method.sampling import draft_keys, sample_rows
from tests import programs, tiny
from tests.test_families import LENGTH, MAX_TOKENS, naive, prompts, target
from tests.test_losslessness import OracleDrafter
from tests.tiny import causal_attention


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield


@dataclass(frozen=True, kw_only=True)
class WalkConfig(EngineConfig):
    """Every batch fits into each of several buckets, so a test chooses the K of each round."""

    num_buckets: int

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        return tuple(self.max_num_seqs + i for i in range(self.num_buckets))


def walk_config(most: int, drafts: list[int], rows: int, **sizes) -> WalkConfig:
    """Buckets of K = `drafts`, each for up to `rows` requests."""
    schedule = [(rows + i, rows + i, k) for i, k in enumerate(drafts)]
    return WalkConfig(
        num_draft=most, draft_schedule=schedule, num_buckets=len(drafts), max_num_seqs=rows, **sizes
    )


def only(engine: Engine, size: int) -> None:
    """The next round runs in this bucket."""
    engine.scheduler.rounds = {size: (engine.config.num_draft_at(size),)}


def step_with_any_k(engine: Engine, rng: random.Random) -> int:
    """One step in a random bucket. Returns the bucket's K."""
    size = rng.choice(engine.config.batch_buckets)
    only(engine, size)
    engine.step()
    return engine.config.num_draft_at(size)


def walk(
    engine: Engine, rng: random.Random, step: Callable[[Engine, random.Random], int]
) -> tuple[list[Request], set[tuple[int, int]]]:
    """Requests of mixed lengths that come, end and are aborted while K changes in every round.

    `step` runs a step of the engine and returns the K of its round.

    Returns the requests, whose ids are (prompt, number), and the pairs of K that followed each other.
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


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "oracle"), *zip(tiny.FAMILIES, itertools.cycle(("peagle", "eagle3")))],
)
def test_output_is_unchanged_by_any_sequence_of_k(family, method, num_cases):
    config = walk_config(
        4, [4, 0, 2], 6, num_pages=50, max_model_len=LENGTH, page_size=4, prefill_chunk=16,
        prefill_rows=2,
    )  # fmt: skip
    if method == "oracle":  # random heads are hardly ever right
        engine = Engine(target(family), None, config, drafter=oracle(family, 4))
    else:
        engine = Engine(target(family), tiny.head(method), config)
    engine.warm_up()
    assert engine.num_programs == 5 + bool(engine.config.saved_rings)
    check_walks(engine, family, step_with_any_k, num_cases("walks over K", 3))
    counts = engine.scheduler.acceptance
    assert counts.accepted > 0.3 * counts.drafted if method == "oracle" else counts.drafted > 0


def check_texts(requests: list[Request], family: str) -> None:
    """Fails unless each request of a walk has the text of plain decoding, up to its end or abort."""
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
    """Runs `count` walks over K = 0, 2 and 4; fails unless all texts are those of plain decoding."""
    num_programs, pairs = engine.programs.num_compiled, set()
    assert num_programs == engine.num_programs
    for seed in range(count):
        requests, some = walk(engine, random.Random(seed), step)
        pairs |= some
        check_texts(requests, family)
    assert {(a, b) for a in (0, 2, 4) for b in (0, 2, 4)} <= pairs
    assert engine.scheduler.num_preemptions > 0
    assert engine.programs.num_compiled == num_programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UniformDrafter:
    """Draws every draft from the uniform distribution: drafts for one position of a text are equal."""

    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        positions = (inputs.start + inputs.num_real)[:, None] + 1 + jnp.arange(self.num_draft)
        q = jnp.full((*positions.shape, target.config.vocab_size), 1 / target.config.vocab_size)
        keys = draft_keys(inputs.keys, positions, jnp.zeros_like(inputs.start))
        return Proposal(sample_rows(q, keys), q), cache

    def absorb(self, target, inputs, cache):
        return cache


def check_law(observed: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square test; rare outcomes are pooled, as the approximation needs."""
    common = expected * observed.sum() >= 5
    f_obs = np.append(observed[common], observed[~common].sum())
    f_exp = np.append(expected[common], expected[~common].sum()) * observed.sum()
    some = f_exp > 1e-6
    f_exp = f_exp[some] * f_obs.sum() / f_exp[some].sum()
    assert stats.chisquare(f_obs[some], f_exp).pvalue > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "draft_sampling"),
    [
        ("uniform", "sample"),
        ("peagle", "argmax"),
        ("peagle", "sample"),
        ("eagle3", "argmax"),
        ("eagle3", "sample"),
    ],
)
def test_sampled_output_has_the_targets_law_while_k_changes(method, draft_sampling, num_cases):
    """Joint law of four tokens, vocabulary 4, against exact probabilities, as in test_losslessness.

    A round of K = 2 after one of K = 1 finds a second draft of an older round in the state. It was drawn
    with the random key of its position, and so was the first draft of the round between if that round
    emitted one token. With `UniformDrafter` the two are equal: a text that takes both repeats tokens more
    often than the target does, which the law of the last two tokens shows.
    """
    config = walk_config(2, [2, 0, 1], 64, draft_sampling=draft_sampling, **TINY_TEXTS)
    count = num_cases("sampled texts under changing K", 6000, least=6000)
    # K = 1, 2, 1, 2, 0; for UniformDrafter 1, 2: half of the texts begin with what it is to find.
    sizes = itertools.cycle((66, 64) if method == "uniform" else (66, 64, 66, 64, 65))

    def step(engine: Engine) -> None:
        only(engine, next(sizes))
        engine.step()

    check_sampled_law(method, config, step, count)


TINY_TEXTS = dict(
    max_model_len=16, page_size=4, prefill_chunk=8, prefill_rows=16, max_logprobs=0,
    max_waiting=10**6,
)  # fmt: skip


def check_sampled_law(
    method: str, config: EngineConfig, step: Callable[[Engine], None], count: int, **options
) -> Engine:
    """Fails unless `count` texts of four tokens have the joint law of the target, vocabulary 4.

    Args:
      method: of the head, or "uniform" for `UniformDrafter`.
      step: runs a step of the engine.
      options: of the engine.
    """
    small, prompt, V, T = dict(vocab_size=4), [2, 3, 3, 0, 1], 4, 4
    temperature = 1.0 if method == "uniform" else 4.0  # so that many uniform drafts are rejected
    model = tiny.target(seed=3, **small)
    heads = [tiny.head(method, seed=5, draft_vocab_size=V, **small)] if method != "uniform" else []
    drafter = None if heads else UniformDrafter(2)
    engine = Engine(model, *heads or [None], config, drafter=drafter, **options)
    engine.warm_up()
    params = SamplingParams(max_tokens=T, temperature=temperature)  # the number is the seed
    requests = [engine.add_request(prompt, params) for _ in range(count)]
    while engine.has_work:
        step(engine)
    assert 0.1 < engine.scheduler.acceptance.rates[0] < 0.95

    texts = np.stack(np.meshgrid(*[np.arange(V)] * T, indexing="ij"), -1).reshape(-1, T)
    rows = np.concatenate([np.tile(prompt, (len(texts), 1)), texts[:, :-1]], axis=1)
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden, _, _ = model(rows, positions, [None] * 3, causal_attention)
    p = np.asarray(jax.nn.softmax(model.unembed(hidden) / temperature, axis=-1), np.float64)
    places = len(prompt) - 1 + np.arange(T)
    expected = np.prod(p[np.arange(len(texts))[:, None], places, texts], axis=1)
    observed = np.zeros(len(texts))
    np.add.at(observed, [np.ravel_multi_index(r.output, [V] * T) for r in requests], 1)
    check_law(observed, expected)
    pairs = [x.reshape(V ** (T - 2), V**2).sum(axis=0) for x in (observed, expected)]
    check_law(*pairs)
    return engine


@pytest.mark.slow
def test_rounds_have_the_k_of_their_batch_size():
    schedule = [[1, 1, 3], [2, 3, 0], [4, 8, 2]]
    config = EngineConfig(
        num_draft=3, draft_schedule=schedule, max_num_seqs=4, max_model_len=LENGTH
    )
    engine = Engine(target("llama"), tiny.head(), config)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 6, 9, 30)]
    requests = [engine.add_request(*one) for one in zip(prompts(), params, strict=False)]
    seen = set()
    while engine.has_work:
        engine.step()
        calls = [call for call, _ in engine._in_flight if hasattr(call, "drafted")]
        seen |= {(len(call.requests), call.num_draft) for call in calls}
    assert seen == {(1, 3), (2, 0), (4, 2)}
    outputs = [naive("llama")[i][: one.max_tokens] for i, one in enumerate(params)]
    assert [request.output for request in requests] == outputs


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("own", [1, 3])
def test_every_call_makes_the_drafts_that_the_engine_counts(own):
    """A drafter made for another K: each draft that the target verifies is a fresh one, and right."""
    config = walk_config(2, [2], 2, max_model_len=LENGTH)
    engine = Engine(target("llama"), None, config, drafter=oracle("llama", own))
    params = [SamplingParams(max_tokens=1 + 3 * 3), SamplingParams(max_tokens=1 + 3 * 2)]
    done = engine.generate(prompts()[:2], params)
    assert [(c.rounds, c.drafted, c.accepted) for c in done] == [(3, 6, 6), (2, 4, 4)]


def test_a_plan_is_uploaded_only_when_it_changes(monkeypatch):
    """All positions are in one page, so the plans of all rounds are equal, whatever made the drafts."""
    config = walk_config(4, [2], 1, max_model_len=LENGTH, page_size=LENGTH, prefill_chunk=LENGTH)
    engine = Engine(target("llama"), None, config, drafter=oracle("llama", 4))
    engine.warm_up()
    uploaded = []
    upload = transfer._unpack_into
    watch = lambda plan, packed: uploaded.append(type(plan)) or upload(plan, packed)
    monkeypatch.setattr(transfer, "_unpack_into", watch)
    (done,) = engine.generate(prompts()[:1], SamplingParams(max_tokens=1 + 3 * 5))
    assert done.rounds == 5
    assert uploaded == [PrefillPlan, DecodePlan]


def test_a_schedule_holds_for_the_sizes_between_its_ranges():
    schedule = parse("[[2, 8, 5], [16, 32, 9], [33, 33, 0]]")
    sizes = (1, 2, 8, 9, 15, 16, 32, 33, 500)
    assert [num_draft_at(schedule, n, 7) for n in sizes] == [7, 5, 5, 5, 5, 7, 7, 0, 0]
    assert num_draft_at((), 500, 7) == 7
    assert EngineConfig(draft_schedule=[[1, 2, 3]]).draft_schedule == ((1, 2, 3),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1, 8, 7]", "is not JSON"),
        pytest.param("[" * 10**5, "is not JSON", id="nested too deeply"),
        ("7", "must be a list"),
        ('{"1-8": 7}', "must be a list"),
        ("[7]", "7 must be three whole numbers"),
        ("[[1, 8]]", "must be three whole numbers"),
        ("[[1, 8, 2.5]]", "must be three whole numbers"),
        ("[[1, 8, true]]", "must be three whole numbers"),
        ("[[1, 8, -1]]", "K must not be negative"),
        ("[[0, 8, 3]]", "begin at 1 or more"),
        ("[[9, 8, 3]]", "begin at 1 or more"),
        ("[[1, 8, 3], [8, 9, 1]]", "above the range before"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert "num_speculative_tokens_per_batch_size" in str(caught.value)


@pytest.mark.parametrize("ranges", [None, 7, "[[1, 8, 7]]"])
def test_a_configuration_takes_a_list_of_ranges(ranges):
    with pytest.raises(ConfigError, match="must be a list of"):
        EngineConfig(draft_schedule=ranges)
