"""Constraints are checked in a process of their own: hostile ones end there, in bounded time."""

import asyncio
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from peagle_jax import ConfigError
from peagle_jax.cli.model_folders import ASSETS
from peagle_jax.engine.structured.grammar import Grammars, Matcher
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import Tokenizer
from serving import caller, constraints
from serving.constraint_memory import ConstraintMemory, allocated
from serving.constraints import Constraints
from serving.errors import Code, ServiceError
from serving.grammar_process import Vocabulary
from serving.messages import Checked
from tests.waiting import LIMIT, soon


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """What `Constraints` reads of an engine."""
    tokenizer = Tokenizer(ASSETS / "target")
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [0])
    config = SimpleNamespace(vocab_size=tokenizer.vocab_size, eos_ids=(0,))
    return SimpleNamespace(grammars=grammars, tokenizer=tokenizer, target_config=config)


def run(engine, work, total: int = 1 << 30):
    """Runs `work(constraints)` in an event loop, with constraints that are closed afterwards.

    Args:
      total: bytes that compiled constraints may take.
    """

    async def main():
        memory = ConstraintMemory(total)

        def compiled(constraint: Checked, number: int) -> list[Matcher]:
            lease = memory.lease(constraint.origin, constraint.memory)
            matcher = engine.grammars.matcher(constraint.definition)
            matcher.lease = lease
            return [matcher, *(matcher.again() for _ in range(number - 1))]

        prepare = lambda: engine.grammars.prepare()
        worker = dict(description=engine, matchers=compiled, prepare_matchers=prepare)
        made = Constraints(SimpleNamespace(**worker))
        try:
            return await asyncio.wait_for(work(made), LIMIT)
        finally:
            made.close()
            await made.wait_closed(LIMIT)

    return asyncio.run(main())


def nested(depth: int) -> dict:
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(rule: str, length: int) -> Structured:
    """A grammar whose rules, or terminals, each name the next."""
    rules = "\n".join(f"{rule}{i}: {rule}{i + 1}" for i in range(length))
    return Structured.grammar(f'start: {rule}0\n{rules}\n{rule}{length}: "a"')


def doubling(length: int) -> Structured:
    rules = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(length))
    return Structured.grammar(f'start: R0\n{rules}\nR{length}: "a"')


FATAL = {
    "a multiple that takes minutes": Structured.json_schema(
        {"type": "integer", "multipleOf": 12345678}
    ),
    "rules without end": chain("r", 15_000),
    "a text of 2^900 letters": doubling(900),
}
REFUSED = {
    "depth": Structured.json_schema(nested(100)),
    "size": Structured.json_schema({"enum": [f"value {i}" for i in range(30_000)]}),
    "combinations": Structured.json_schema(
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(3)]} for i in range(20)]}
    ),
    "feature": Structured.json_schema({"type": "array", "uniqueItems": True}),
    "parentheses of a regex": Structured.regex("(" * 1000 + "a" + ")" * 1000),
    "parentheses of GBNF": Structured.grammar("root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "a long text that is forced": Structured.regex("a{200000}"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*FATAL, *REFUSED])
def test_a_hostile_constraint_is_refused_in_bounded_time_and_the_next_one_is_not(engine, name):
    structured = (FATAL | REFUSED)[name]

    async def work(made):
        begin = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            await made.compile(structured, field="response_format")
        took = time.monotonic() - begin
        assert await made.compile(Structured.json_object(), field="response_format")
        return caught.value, took

    error, took = run(engine, work)
    assert took < LIMIT
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "response_format")
    assert ("too complex" in error.message) == (name in FATAL), error.message
    assert "\n" not in error.message


def test_checks_leave_the_processor_to_the_engine(engine):
    """`nice` counts within a session alone: Linux's scheduler gives each its own share."""

    async def work(made):
        await made.compile(Structured.regex("a"), field="f")
        (pid,) = (one._process.pid for one in made._processes if one._process is not None)
        nice = lambda process: os.getpriority(os.PRIO_PROCESS, process)
        assert nice(pid) == min(19, nice(0) + 10)
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) != os.getpgid(0)  # an interrupt at the terminal does not reach it

    run(engine, work)


class Held:
    """Checks that end when a test releases them, and refuse with the rule "held"."""

    def __init__(self, monkeypatch):
        self.asked: list[str] = []
        self._permits = threading.Semaphore(0)
        monkeypatch.setattr(constraints.Process, "ask", lambda _, constraint: self(constraint))

    def __call__(self, constraint: dict) -> dict:
        self.asked.append(constraint["text"])
        assert self._permits.acquire(timeout=LIMIT)
        return {"error": "held"}

    def release(self, checks: int) -> None:
        self._permits.release(checks)


def ask(made, client: str, *numbers: int, **options) -> list[asyncio.Task]:
    """Requests of one client, each with a constraint of its own."""
    texts = [f"{client}{number}" for number in numbers]
    return [
        asyncio.create_task(made.compile(Structured.regex(text), field="f", **options))
        for text in texts
    ]


def test_a_known_constraint_does_not_wait_for_checks(engine, monkeypatch):
    async def work(made):
        known = Structured.regex("known")
        await made.compile(known, field="f")
        held = Held(monkeypatch)
        others = ask(made, "a", *range(9))
        await soon(lambda: len(held.asked) == 2)
        assert await made.compile(known, field="f")
        assert not any(task.done() for task in others)
        held.release(9)
        await asyncio.wait(others)

    run(engine, work)


@pytest.mark.parametrize("by_token", [True, False])
def test_callers_take_turns(engine, monkeypatch, by_token):
    """One constraint waits for the checks under way, not for all of another caller's."""

    async def work(made):
        held = Held(monkeypatch)

        def of(client: str, address: str, *numbers: int) -> list[asyncio.Task]:
            if by_token:
                caller.enter(client.encode())
                address = "192.0.2.1"  # of a proxy
            return ask(made, client, *numbers, address=address)

        tasks = of("a", "192.0.2.2", *range(6))
        await soon(lambda: len(held.asked) == 2)
        tasks += of("b", "192.0.2.3", 0, 1) + of("c", "2001:db8::1", 0) + of("c", "2001:db8::2", 1)
        for count in range(3, 11):
            held.release(1)
            await soon(lambda count=count: len(held.asked) == count)
        held.release(2)
        await asyncio.wait(tasks)
        return held.asked

    assert run(engine, work) == ["a0", "a1", "b0", "a2", "c0", "b1", "a3", "c1", "a4", "a5"]


def test_a_refusal_is_remembered_for_its_caller(engine, monkeypatch):
    async def work(made):
        held = Held(monkeypatch)
        held.release(9)
        for token in (b"one", b"one", b"another", b"one"):
            caller.enter(token)
            with pytest.raises(ServiceError, match="f: held"):
                await made.compile(Structured.regex("a"), field="f")
        assert len(held.asked) == 2

    run(engine, work)


def test_what_is_remembered_is_bounded_in_number_and_time(monkeypatch):
    monkeypatch.setattr(constraints, "_MOST_REMEMBERED", 3000)
    memory = constraints._Memory()
    for key in (b"a", b"b", b"a", b"c"):
        memory.get(key, "a") or memory.put(key, f"text of {key}", 500, "a")
    assert [memory.get(key, "a") is None for key in (b"a", b"b", b"c")] == [False, True, False]
    short = constraints._Memory(seconds=0.0)
    short.put(b"a", "text", 4, "a")
    assert short.get(b"a", "a") is None
    assert not short._sizes


def test_a_client_makes_the_server_forget_no_constraint_of_others(monkeypatch):
    """Not even one that it has sent first."""
    monkeypatch.setattr(constraints, "_MOST_REMEMBERED", 20_000)
    memory = constraints._Memory()
    memory.put(b"mine", "value", 100, "me")
    memory.put(b"first", "value", 100, "other")
    assert memory.get(b"first", "me") == memory.get(b"first", "other") == "value"
    for place in range(100):
        memory.put(b"%d" % place, "value", 1000, "other")
    for key in (b"mine", b"first", b"99"):
        assert memory.get(key, "me") == "value"
    assert memory.get(b"0", "me") is None
    assert memory._sizes.total() <= 20_000


def test_no_caller_learns_from_the_time_which_constraints_others_send(engine, monkeypatch):
    checked = []
    ask = constraints.Process.ask

    def count(process, constraint):
        checked.append(constraint)
        return ask(process, constraint)

    async def work(made):
        for token in (b"one", b"another", b"one"):
            caller.enter(token)
            await made.compile(Structured.choice(["secret"]), field="structured")

    monkeypatch.setattr(constraints.Process, "ask", count)
    run(engine, work)
    assert len(checked) == 2


def test_a_model_without_a_tokenizer_refuses_constraints_by_name():
    engine = SimpleNamespace(grammars=None, tokenizer=None, target_config=None)

    async def work(made):
        with pytest.raises(
            ServiceError, match=r"structured_outputs\.regex: needs a model with a tok"
        ):
            await made.compile(Structured.regex("a"), field="structured_outputs.regex")

    run(engine, work)


def test_the_check_recognises_the_special_tokens_of_the_vocabulary(engine):
    async def work(made):
        named = Structured.grammar('start: <|reserved_0|> <[4]> "x"')
        (matcher,) = await made.compile(named, field="structured")
        matcher.consume([engine.tokenizer.added["<|reserved_0|>"], 4])
        assert matcher.error is None
        with pytest.raises(ServiceError):
            await made.compile(Structured.grammar("start: <|nowhere|>"), field="structured")

    run(engine, work)


def test_a_server_that_ends_refuses_the_constraint_that_is_checked(engine):
    async def work(made):
        hostile = made.compile(FATAL["a multiple that takes minutes"], field="structured")
        task = asyncio.create_task(hostile)
        await soon(lambda: any(one._process for one in made._processes))
        running = [one._process for one in made._processes if one._process is not None]
        made.close()
        with pytest.raises(ServiceError, match="shuts down") as caught:
            await task
        return caught.value, running

    error, running = run(engine, work)
    assert error.code is Code.UNAVAILABLE
    assert all(process.returncode is not None for process in running)


def test_a_process_that_cannot_be_started_is_an_error_and_the_next_one_is_tried(
    engine, monkeypatch
):
    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def work(made):
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(ServiceError, match="cannot be started") as caught:
                await made.compile(Structured.json_object(), field="structured")
        assert caught.value.code is Code.UNAVAILABLE
        assert await made.compile(Structured.json_object(), field="structured")

    run(engine, work)


@pytest.mark.parametrize("moment", ["idle", "at every question"])
def test_a_process_that_is_killed_from_outside_is_not_the_constraints_fault(
    engine, monkeypatch, moment
):
    """As the kernel does when memory is short."""

    def kill(process: constraints.Process) -> None:
        process._process.kill()
        process._process.wait()

    send = constraints.Process._send

    def send_to_killed(process, line, deadline):
        kill(process)
        send(process, line, deadline)

    async def work(made):
        await made.compile(Structured.regex("a"), field="structured")
        if moment == "idle":
            for process in made._processes:
                if process._process is not None:
                    kill(process)
            assert await made.compile(Structured.regex("b"), field="structured")
            return
        with monkeypatch.context() as patch:
            patch.setattr(constraints.Process, "_send", send_to_killed)
            with pytest.raises(ServiceError, match="killed from outside") as caught:
                await made.compile(Structured.regex("c"), field="structured")
        assert (caught.value.code, caught.value.retry_after) == (Code.UNAVAILABLE, 1.0)
        assert await made.compile(Structured.regex("c"), field="structured")

    run(engine, work)


def test_a_process_that_does_not_read_is_given_up():
    """Its pipe is full long before the constraint is written."""
    process = constraints.Process(
        lambda: Vocabulary(1, [0], {"a" * 1000: 0}), ["sleep", "60"], seconds=0.5
    )
    try:
        assert process.ask({"kind": "regex", "text": "a" * 250_000, "frame": None}) is None
    finally:
        process.end()


def costly(number: int) -> Structured:
    """A constraint of its own that takes half a megabyte."""
    names = {f"name{number}_{place}": {"type": "string"} for place in range(200)}
    return Structured.json_schema({"type": "object", "properties": names})


def test_constraints_that_wait_take_bounded_memory(engine, monkeypatch):
    """It is refused before it is compiled; other callers have a share; memory comes back."""
    compiled = []
    matcher = engine.grammars.matcher
    monkeypatch.setattr(engine.grammars, "matcher", lambda *a: compiled.append(a) or matcher(*a))

    async def work(made):
        caller.enter(b"hostile")
        waiting = [await made.compile(costly(0), field="f", number=9)]
        size = next(iter(made._known._entries.values())).value.memory
        assert 200_000 < size < 2_000_000
        while True:
            try:
                waiting.append(await made.compile(costly(len(waiting)), field="f"))
            except ServiceError as raised:
                error = raised
                break
        assert "this client's open requests" in error.message
        assert (error.code, error.retry_after) == (Code.RESOURCE_EXHAUSTED, 1.0)
        assert 2 <= len(waiting) == len(compiled)
        caller.enter(b"another")
        assert await made.compile(costly(0), field="f")
        caller.enter(b"hostile")
        waiting.clear()
        assert await made.compile(costly(98), field="f")

    run(engine, work, total=6_000_000)


def test_a_lease_may_end_while_the_same_thread_counts():
    memory = ConstraintMemory(200)
    lease = memory.lease("a", 100)
    with memory._lock:  # as a collection of garbage within the count would end it
        del lease
    assert memory.lease("a", 100)


def test_sequences_that_wait_share_one_compiled_constraint(engine):
    many = run(engine, lambda made: made.compile(costly(0), field="f", number=100))
    before = allocated()
    again = [one.again() for one in many]
    assert allocated() - before < 100_000, "a copy is made at the first use"
    again[0].consume(engine.tokenizer.encode("{", special=False))
    assert again[0].error is None
    assert not many[0].is_complete


def test_large_definitions_are_remembered_too(engine, monkeypatch):
    async def work(made):
        large = Structured.json_schema({"enum": [f"value {place}" for place in range(3000)]})
        await made.compile(large, field="f")
        monkeypatch.setattr(constraints.Process, "ask", lambda *_: pytest.fail("checked again"))
        assert await made.compile(large, field="f")

    run(engine, work)


@pytest.mark.parametrize("kind", ["choice", "json_schema"])
def test_half_of_a_surrogate_pair_is_named(engine, kind):
    half = "\ud800"
    text = {"choice": [half], "json_schema": {"const": half}}.get(kind, f'start: "{half}"')
    with pytest.raises(ServiceError, match="half of a surrogate pair"):
        run(engine, lambda made: made.compile(getattr(Structured, kind)(text), field="f"))


def test_a_schema_that_is_too_long_is_refused_before_it_is_parsed():
    with pytest.raises(ConfigError, match="characters are more than"):
        Structured.json_schema("[" * (1 << 20))
