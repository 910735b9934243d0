"""A scheduler and `FakeDevice` in the engine's loop, and what must hold of each request."""

import random
from collections import Counter

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import Calls
from peagle_jax.engine.host.request import Request, RequestState
from peagle_jax.engine.host.scheduler import Scheduler
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.engine.structured.grammar import Matcher, masks_of
from peagle_jax.sampling_params import SamplingParams
from tests.engine.fake_device import VOCAB, FakeDevice, allowed_next

EOS = 59


def ends_in_seventeen(output: list[int]) -> str | None:
    return "seventeen" if sum(output[-2:]) % 17 == 0 else None


def make_request(id: int, prompt: list[int], num_draft: int, *, seed=0, **fields) -> Request:
    names = {"stop_checker", "matcher", "priority"} & fields.keys()
    own = {name: fields.pop(name) for name in names}
    params = SamplingParams(**fields)
    return Request(id=id, prompt=prompt, params=params, num_draft=num_draft, seed=seed, **own)


class AnyK:
    """In place of `LoadPolicy`: each round has another K."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def choose(self, size: int, rows, drafts) -> int:
        return self.rng.choice(drafts)

    def record(self, rows) -> None:
        pass


class FakeEngine:
    """The loop of the real engine: dispatch, then commit what was dispatched `lag` steps before."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        lag: int = 1,
        seed: int = 0,
        windows=(),
        idle_prefills: int = 1,
    ):
        self.config, self.lag = config, lag
        self.scheduler = Scheduler(config, eos_ids=[EOS], windows=windows)
        self.idle_prefills = self.scheduler.idle_prefills = idle_prefills
        self.device = FakeDevice(config, self.scheduler.pool, random.Random(seed), windows)
        self.in_flight: list = []
        self.streams: dict = {}
        self.ends: Counter = Counter()
        self.num_rows = self.num_refused = 0
        self.num_drafted: Counter = Counter()

    def vary_k(self, rng: random.Random) -> None:
        """Each round has another K from now on."""
        self.scheduler.policy = AnyK(rng)
        self.scheduler.rounds = dict.fromkeys(self.config.batch_buckets, (0, 1, 3, 5))

    def add(self, prompt: list[int], num_draft: int | None = None, salt=(), **fields) -> Request:
        num_draft = self.config.num_draft if num_draft is None else num_draft
        request = make_request(len(self.streams), prompt, num_draft, **fields)
        request.salt = salt
        self.scheduler.add(request)
        self.streams[request.id] = []
        return request

    def abort(self, request: Request) -> None:
        self.ends[request.id] += not request.is_finished
        self.scheduler.abort(request)
        assert request.slot is None
        assert not request.pages

    def dispatch(self) -> Calls:
        preemptions, before = self.scheduler.num_preemptions, list(self.scheduler.active)
        due = self.due()
        calls = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_order()
        if self.scheduler.num_preemptions > preemptions:
            rows = {request for call in calls.prefills for request in call.requests}
            assert rows <= {None, *before}, "admitted beside a preemption"
        assert len(calls.prefills) <= (1 if due else self.idle_prefills)
        if calls.decode is not None:
            num_rows = sum(request is not None for request in calls.decode.requests)
            sizes = [size for size in self.config.batch_buckets if size >= num_rows]
            assert len(calls.decode.requests) == min(sizes)
            if self.scheduler.policy is None:
                assert calls.decode.num_draft == self.config.num_draft
            self.num_rows += num_rows
        self.in_flight.append((calls, self.device.run(calls)))
        return calls

    def due(self) -> list[Request]:
        """The requests that decode: those in a next round, however late it is."""
        is_ending = self.scheduler._is_ending
        return [
            r for r in self.scheduler.active if r.state is RequestState.RUNNING and not is_ending(r)
        ]

    def check_order(self) -> None:
        """Fails if a request runs before an older one of its priority."""
        active, waiting = self.scheduler.active, self.scheduler.waiting
        for priority in {request.priority for request in active}:
            order = [one.id for one in [*active, *waiting] if one.priority == priority]
            assert order == sorted(order), "a request overtook an older one"

    def commit(self) -> None:
        calls, results = self.in_flight.pop(0)
        updates = []
        for call, result in zip(calls.prefills, results["prefill"], strict=True):
            updates += self.scheduler.commit_prefill(call, *result)
        if calls.decode is not None:
            for request, drafted in zip(calls.decode.requests, calls.decode.drafted, strict=False):
                self.num_drafted[request.id] += 0 if request.is_finished else drafted
            updates += self.scheduler.commit_decode(calls.decode, *results["decode"])
        for request, tokens in updates:
            self.check_round(request, tokens)
            assert not self.ends[request.id], "a finished request received tokens"
            self.streams[request.id] += tokens
            self.ends[request.id] += request.is_finished
        self.scheduler.check_integrity()

    def check_round(self, request: Request, tokens: list[int]) -> None:
        """The drafts that the host read are those verified: their leading ones are output."""
        if request.last_round is None:
            assert len(tokens) == 1, request.error
            return
        drafts, accepted, num_tokens = request.last_round
        assert num_tokens == len(tokens)
        assert drafts[:accepted] == tokens[:accepted]
        if accepted < min(len(drafts), len(tokens)):
            assert drafts[accepted] != tokens[accepted]
            self.num_refused += 1

    def step(self) -> None:
        self.dispatch()
        while len(self.in_flight) > self.lag:
            self.commit()

    def drain(self, limit: int = 5000) -> None:
        while self.scheduler.has_work:
            limit -= 1
            assert limit > 0, "no progress"
            self.step()
        while self.in_flight:
            self.commit()
        assert self.scheduler.pool.num_free == self.config.total_pages - 1
        assert len(self.scheduler.free_slots) == self.config.max_num_seqs


def expected(
    request: Request, max_model_len: int, matcher: Matcher | None = None
) -> tuple[list[int], str, int | str | None]:
    """Output, finish reason and stop reason of a request served alone, without drafts.

    `matcher` is a new one of the request's constraint.
    """
    output, params = [], request.params
    while True:
        allowed = None
        if matcher is not None:
            words = masks_of([(matcher, ())], size=1, height=1)[0, 0]
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        token = allowed_next(request.prompt + output, allowed)
        output.append(token)
        if matcher is not None:
            matcher.consume([token])
        if token in params.stop_ids or (token == EOS and not params.ignore_eos):
            return output, "stop", token
        if request.stop_checker and request.stop_checker(output):
            return output, "stop", request.stop_checker(output)
        if len(output) == params.max_tokens or len(request.prompt + output) == max_model_len:
            return output, "length", None


def check_counts(request: Request) -> None:
    """Rounds and accepted drafts say how many tokens there are: see docs/algorithm.md."""
    counts, size = Acceptance.of([request]), len(request.output)
    assert counts.accepted <= counts.drafted <= counts.rounds * request.num_draft
    assert counts.accepted == sum(counts.per_position)
    assert counts.drafted == sum(counts.drafted_per_position)
    assert list(counts.per_position) == sorted(counts.per_position, reverse=True)
    if not request.output:
        assert (counts.rounds, counts.emitted, counts.accepted) == (0, 0, 0)
        return
    ends_on_a_draft = 1 + counts.rounds + counts.accepted - size
    # Only a text's own end cuts a round short; an abort comes between two rounds.
    may = counts.accepted > 0 and request.finish_reason in ("stop", "length")
    assert ends_on_a_draft in (0, int(may))
    assert counts.emitted == size - 1
    assert counts.length == ((size - 1) / counts.rounds if counts.rounds else 1.0)
    assert 1 <= counts.length <= 1 + request.num_draft


def check_finished(request: Request, engine: FakeEngine, matcher: Matcher | None = None) -> None:
    assert engine.ends[request.id] == 1
    assert request.state is RequestState.FINISHED
    assert engine.streams[request.id] == request.output
    ending = (request.output, request.finish_reason, request.stop_reason)
    wanted = expected(request, engine.config.max_model_len, matcher)
    if request.finish_reason == "abort":
        wanted = (wanted[0][: len(request.output)], "abort", None)
    assert ending == wanted
    check_counts(request)
    assert request.drafted == engine.num_drafted[request.id]
    assert request.unread_drafts == 0
    if engine.scheduler.policy is None:
        assert request.drafted == request.rounds * request.num_draft
    n = request.params.logprobs
    if n is None:
        assert request.logprobs is None
        return
    wanted = [(-t / 4, [(t + i, -(t + i) / 4) for i in range(n)]) for t in request.output]
    assert request.logprobs == wanted


def random_prompt(rng: random.Random, most: int, earlier: list[Request]) -> list[int]:
    """1 to `most` tokens: random, the start of one of three texts, or of an earlier request's."""
    kind = rng.random()
    if kind < 0.4:
        length = rng.choice([rng.randint(1, 8), rng.randint(1, most)])
        return [rng.randrange(VOCAB) for _ in range(length)]
    if kind < 0.7 or not earlier:
        which = rng.randint(1, 3)
        text = [(which * i * i + i) % VOCAB for i in range(most)]
    else:
        text = rng.choice(earlier[-20:]).tokens
    tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, rng.randint(0, 9)]))]
    return [*text[: rng.randint(1, most)], *tail][:most]


def make_config(J, B, max_len, Z, P, T, R, saved=0) -> EngineConfig:
    return EngineConfig(
        num_draft=J,
        max_num_seqs=B,
        max_model_len=max_len,
        page_size=Z,
        num_pages=P,
        prefill_chunk=T,
        prefill_rows=R,
        max_waiting=3,
        saved_rings=saved,
    )
