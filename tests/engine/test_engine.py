"""The engine's public face: endings, aborts, refusals, logprobs, seeds, overlap."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.engine.host.request import Request, Round
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.errors import NotReady
from peagle_jax.text.tokenizer import Tokenizer
from tests import programs, tiny
from tests.programs import one_bucket
from tests.vocabularies import letter_tokenizer

J, MAX_TOKENS, VOCAB = 3, 20, tiny.TARGET.vocab_size
EOS_IDS = tuple(range(112, VOCAB))  # an eighth of the vocabulary: texts do end in a random model
SIZES = dict(
    num_draft=J,
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    prefill_chunk=8,
    prefill_rows=2,
    max_waiting=6,
    max_logprobs=3,
)
PROMPTS = [
    np.random.default_rng(i).integers(2, VOCAB, n).tolist()
    for i, n in enumerate((1, 5, 8, 9, 16, 23, 3, 30))
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def small_head(**changes):
    return tiny.head(**tiny.HEAD_OF_ONE_LAYER, **changes)


@pytest.fixture(scope="module")
def target():
    return tiny.target(eos_ids=EOS_IDS, **tiny.ONE_LAYER)


@pytest.fixture(scope="module")
def shared(target, tokenizer) -> Engine:
    """One speculating engine for most tests: its programs compile once."""
    with programs.shared(controls=False):
        return one_bucket(Engine(target, small_head(), EngineConfig(**SIZES), tokenizer=tokenizer))


@pytest.fixture
def engine(shared) -> Engine:
    """The shared engine, which every test must leave empty."""
    yield shared
    assert not shared.has_work
    shared.scheduler.check_integrity()
    assert shared.scheduler.pool.num_free == shared.config.total_pages - 1


@pytest.fixture(scope="module")
def plain(target) -> Engine:
    """No head and no tokenizer."""
    with programs.shared(controls=False):
        return one_bucket(Engine(target, None, EngineConfig(**SIZES)))


@pytest.fixture(scope="module")
def natural(plain) -> list[list[int]]:
    """What the target says after each prompt when nothing ends it."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [c.tokens for c in plain.generate(PROMPTS, params)]


def upto(tokens: list[int], ends) -> list[int]:
    """Up to and with the first token in `ends`."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: at + 1]


def test_the_models_end_of_sequence_ends_a_text_unless_it_is_ignored(engine, natural):
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.tokens for c in done] == [upto(tokens, EOS_IDS) for tokens in natural]
    for completion in done:
        ended = completion.tokens[-1] in EOS_IDS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop_reason == (completion.tokens[-1] if ended else None)
    assert {c.finish_reason for c in done} == {"stop", "length"}
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert [c.tokens for c in done] == natural


def test_a_text_ends_where_the_model_length_does(engine):
    (done,) = engine.generate([PROMPTS[7]], SamplingParams(max_tokens=99, ignore_eos=True))
    assert len(done.prompt) + len(done.tokens) == engine.config.max_model_len
    assert done.finish_reason == "length"


def test_stop_ids_end_a_text_and_belong_to_it(engine, natural):
    stops = [(tokens[6], 1) for tokens in natural]
    params = [SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, stop_ids=s) for s in stops]
    for completion, stop, tokens in zip(
        engine.generate(PROMPTS, params), stops, natural, strict=True
    ):
        assert completion.tokens == upto(tokens, stop)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", completion.tokens[-1])


def test_stop_strings_end_a_text_across_token_borders_and_are_cut_off(engine, natural, tokenizer):
    stops = [tokenizer.decode(t[7:8])[-1] + tokenizer.decode(t[8:9])[0] for t in natural]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, stop=("never said", stop))
        for stop in stops
    ]
    for completion, stop, tokens in zip(
        engine.generate(PROMPTS, params), stops, natural, strict=True
    ):
        assert completion.text == tokenizer.decode(tokens).split(stop)[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert stop in tokenizer.decode(completion.tokens)
        assert stop not in tokenizer.decode(completion.tokens[:-1])


def test_text_goes_in_and_comes_out_as_its_tokens_do(engine, tokenizer):
    params = SamplingParams(max_tokens=8)
    text = "a-prompt ag bh"
    by_text, by_ids = engine.generate([text, tokenizer.encode(text)], params)
    assert by_text.tokens == by_ids.tokens
    assert by_text.prompt == tokenizer.encode(text)
    assert by_text.text == tokenizer.decode(by_text.tokens)


def test_updates_stream_every_token_once_and_in_order(engine, natural):
    streams: dict[int, list[int]] = {}
    rounds: dict[int, list[Round]] = {}

    def collect(request: Request, tokens: list[int]) -> None:
        streams.setdefault(request.id, []).extend(tokens)
        rounds.setdefault(request.id, []).append(request.last_round)

    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    done = engine.generate(PROMPTS, params, on_update=collect)
    assert [streams[key] for key in sorted(streams)] == natural == [c.tokens for c in done]
    for c in done:
        assert 0 < c.time_to_first_token <= c.duration
        assert c.accepted == sum(c.accepted_per_position)
        assert c.rounds + c.accepted - c.emitted in (0, 1)
        assert c.emitted == len(c.tokens) - 1
        assert c.drafted == J * c.rounds
    for c, (prefilled, *made) in zip(done, (rounds[key] for key in sorted(rounds)), strict=True):
        assert prefilled is None
        assert (len(made), sum(one.accepted for one in made)) == (c.rounds, c.accepted)
        left = c.tokens[1:]
        for drafts, accepted, num_tokens in made:
            said, left = left[:num_tokens], left[num_tokens:]
            assert drafts[:accepted] == said[:accepted]
            assert accepted == min(J, num_tokens) or drafts[accepted] != said[accepted]
        assert not left


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_at_any_time_frees_at_once_and_leaves_the_others_alone(engine, natural, steps):
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS[:6]]
    for _ in range(steps):
        engine.step()
    gone = requests[steps % 4]
    pages, free = len(gone.pages), engine.scheduler.pool.num_free
    engine.abort(gone)
    assert gone.finish_reason == "abort"
    assert gone.finish_time is not None
    assert engine.scheduler.pool.num_free == free + pages
    output = list(gone.output)
    updates = engine.step()  # results of the call that was in flight
    assert gone not in [request for request, _ in updates]
    finish(engine)
    assert gone.output == output == natural[steps % 4][: len(output)]
    assert all(r is gone or r.output == t for r, t in zip(requests, natural, strict=False))
    engine.abort(requests[5])  # finished ones stay as they are
    assert requests[5].finish_reason == "length"


def test_a_full_queue_refuses_and_takes_more_once_there_is_room(engine, natural):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    places = engine.scheduler.num_places  # of the queue, and free slots
    requests = [engine.add_request(PROMPTS[0], params) for _ in range(places)]
    with pytest.raises(QueueFull, match="retry later"):
        engine.add_request(PROMPTS[0], params)
    while not engine.scheduler.num_places:
        engine.step()
    requests.append(engine.add_request(PROMPTS[1], params))
    finish(engine)
    assert [r.output for r in requests] == [natural[0][:2]] * places + [natural[1][:2]]
    many = engine.generate([PROMPTS[0]] * 15, params)  # more than may wait: generate feeds them in
    assert [c.tokens for c in many] == [natural[0][:2]] * 15


def test_text_needs_a_tokenizer(plain):
    with pytest.raises(ConfigError, match="pass token ids"):
        plain.add_request("hello", SamplingParams())
    with pytest.raises(ConfigError, match="strings need"):
        plain.add_request([5], SamplingParams(stop=("x",)))
    assert plain.generate([[5]], SamplingParams(max_tokens=1))[0].text is None


def test_a_refused_prompt_takes_the_others_of_its_call_with_it(engine):
    with pytest.raises(ConfigError, match="between 0 and 127"):
        engine.generate([PROMPTS[0], [VOCAB], PROMPTS[1]], SamplingParams(max_tokens=5))
    assert not engine.scheduler.has_work
    finish(engine)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_of_a_full_forward_with_and_without_speculation(
    engine, plain, target, temperature
):
    """They are of the model's own distribution: temperature and filters do not enter."""
    params = [
        SamplingParams(
            max_tokens=10, ignore_eos=True, logprobs=n, temperature=temperature, seed=3, top_k=40
        )
        for n in (3, 1, 0, None)
    ]
    for one in (engine, plain):
        for completion, param in zip(one.generate(PROMPTS[2:6], params), params, strict=True):
            if param.logprobs is None:
                assert completion.logprobs is None
                continue
            assert len(completion.logprobs) == len(completion.tokens) == 10
            text = np.array([completion.prompt + completion.tokens])
            padded = np.pad(text, ((0, 0), (0, 64 - text.size)))  # one program for all
            table = np.asarray(jax.nn.log_softmax(tiny.logits(target, padded)[0]))
            for i, (token, got) in enumerate(
                zip(completion.tokens, completion.logprobs, strict=True)
            ):
                row = table[len(completion.prompt) + i - 1]
                assert abs(got.logprob - row[token]) < 1e-4
                best = np.argsort(-row)[: param.logprobs].tolist()
                assert [t for t, _ in got.top] == best
                np.testing.assert_allclose([p for _, p in got.top], row[best], atol=1e-4)


def sample(engine: Engine, prompts, seeds) -> list[list[int]]:
    base = dict(max_tokens=12, ignore_eos=True, temperature=1.2)
    params = [SamplingParams(seed=seed, **base) for seed in seeds]
    return [c.tokens for c in engine.generate(prompts, params)]


def test_a_seed_repeats_a_text_in_any_company(engine):
    first = sample(engine, PROMPTS, range(8))
    assert sample(engine, PROMPTS, range(8)) == first
    assert sample(engine, PROMPTS[::-1], range(7, -1, -1)) == first[::-1]
    assert [sample(engine, [PROMPTS[i]], [i])[0] for i in (2, 5)] == [first[2], first[5]]
    other = sample(engine, PROMPTS, range(8, 16))
    assert all(a != b for a, b in zip(first, other, strict=True))
    high = sample(engine, PROMPTS, [2**32 + i for i in range(8)])  # both words of a seed count
    assert all(a != b for a, b in zip(first, high, strict=True))


def test_requests_without_a_seed_differ_from_each_other(engine):
    texts = sample(engine, [PROMPTS[3]] * 5, [None] * 5)
    assert len({tuple(text) for text in texts}) == 5


class Recorder:
    """Stands before an engine's programs or scheduler and notes the calls by name."""

    def __init__(self, inner, names: dict[str, str], log: list):
        self._inner, self._names, self._log = inner, names, log
        self._plans: list = []  # alive, so that no two have one id

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*args):
            plan = args[1] if name in ("round", "prefill") else args[0].plan
            self._plans.append(plan)
            self._log.append((self._names[name], id(plan)))
            return value(*args)

        return call


def test_a_round_is_dispatched_before_the_one_before_it_is_committed(engine, monkeypatch, natural):
    log: list = []
    dispatch = dict(round="dispatch", prefill="dispatch")
    commit = dict(commit_decode="commit", commit_prefill="commit")
    monkeypatch.setattr(engine, "programs", Recorder(engine.programs, dispatch, log))
    monkeypatch.setattr(engine, "scheduler", Recorder(engine.scheduler, commit, log))
    (done,) = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert done.tokens == natural[1][:9]
    of = lambda name: [(place, plan) for place, (what, plan) in enumerate(log) if what == name]
    dispatched, committed = of("dispatch"), of("commit")
    assert len(dispatched) >= 5
    assert [plan for _, plan in dispatched] == [plan for _, plan in committed]
    for (after, _), (before, _) in zip(dispatched[1:], committed, strict=False):
        assert after < before


COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kw: COMPILED.append(event) if "compile" in event else None
)


def mixed_workload(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    requests: list[Request] = []
    for i in range(24):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 9)),
            temperature=float(rng.choice([0.0, 0.8])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.1])),
            logprobs=[None, 0, 3][i % 3],
            num_speculative_tokens=[None, 0, min(2, engine.config.num_draft)][i % 3],
            stop=("zz",),
            presence_penalty=[0.0, 0.5][i % 2],
        )
        requests.append(engine.add_request(PROMPTS[i % 8], params))
        for _ in range(rng.integers(0, 4) if engine.scheduler.num_waiting < 5 else 8):
            engine.step()
        if i % 7 == 6:
            engine.abort(requests[-2])
    finish(engine)
    assert all(request.is_finished for request in requests)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("kind", ["peagle", "none"])
def test_nothing_compiles_after_warm_up(kind, target, tokenizer):
    head = None if kind == "none" else small_head()
    config = EngineConfig(**(SIZES | dict(max_num_seqs=2, num_pages=20)))
    engine = Engine(target, head, config, tokenizer=tokenizer)
    progress = []
    engine.warm_up(lambda: progress.append(engine.programs.num_compiled))
    assert len(progress) == engine.num_programs == engine.programs.num_compiled == 4
    assert COMPILED, "compilations are not reported under this name any more"
    COMPILED.clear()
    mixed_workload(engine)
    assert engine.programs.num_compiled == 4
    assert COMPILED == []


def test_the_engine_keeps_to_what_target_and_head_were_made_for(caplog):
    target = tiny.target(max_position=40, **tiny.ONE_LAYER)
    engine = Engine(target, small_head(trained_num_draft=2), EngineConfig(**SIZES))
    assert engine.config.max_model_len == 40
    assert "above the 2 this head was trained for" in caplog.text
    caplog.clear()
    Engine(target, small_head(trained_num_draft=3), EngineConfig(**SIZES))
    assert not caplog.text


def test_the_first_request_beyond_the_texts_of_a_heads_training_is_named_once(caplog, target):
    engine = Engine(target, small_head(trained_length=20), EngineConfig(**SIZES))
    for max_tokens, num_draft in ((16, None), (17, 0)):
        params = SamplingParams(max_tokens=max_tokens, num_speculative_tokens=num_draft)
        engine.add_request([1, 2, 3, 4], params)
    assert not caplog.text
    for max_tokens in (17, 18):
        engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=max_tokens))
    assert caplog.text.count("fewer drafts are accepted behind them") == 1
    assert "may reach 21 tokens, and this head was trained on texts of 20" in caplog.text


def test_threads_that_generate_take_turns(shared):
    params = SamplingParams(max_tokens=MAX_TOKENS)
    alone = [shared.generate([prompt], params)[0].tokens for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda prompt: shared.generate([prompt], params)[0].tokens, PROMPTS)
        assert list(done) == alone


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_an_engine_says_that_it_does_not_survive_a_fork(engine):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    signal.alarm(60)
    try:
        with pytest.raises(NotReady):
            engine.release_cache()
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    except NotReady as error:
        os._exit("spawn" not in str(error))
    finally:
        os._exit(2)
