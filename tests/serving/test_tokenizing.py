"""Long texts: refused before they are tokenised, tokenised beside others, a few at a time."""

import asyncio
import queue
import sys
import threading
import time

import grpc
import pytest

from peagle_jax import ConfigError, SamplingParams
from peagle_jax.text.chat_templates import ChatTemplate
from serving.bounded_pool import BoundedPool
from serving.errors import Code, ServiceError
from serving.limits import Limits
from serving.protos import open_inference_pb2, vllm_engine_pb2
from serving.protos import peagle_v1_pb2 as pb
from serving.rpc import open_inference, vllm
from serving.stream import Ask
from serving.tokenizing import Encoder
from tests.serving.live import LiveServer
from tests.serving.scripted import make_tokenizer
from tests.serving.test_fuzz import send_one
from tests.waiting import LIMIT, soon

SECONDS = 60  # limit of every wait
STREAM = f"/{open_inference.SERVICE}/ModelStreamInfer"
RESPONSE = open_inference_pb2.ModelStreamInferResponse.FromString
LONGEST = 96 * 2  # characters: tokens of the model's length, and characters of the longest token


def test_other_threads_run_while_a_text_is_tokenised(tokenizer):
    """No thread is interrupted: another one takes a step only where the lock is released."""
    steps, is_done = 0, threading.Event()

    def count():
        nonlocal steps
        while not is_done.wait(0.0005):
            steps += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        text = "ab cd " * 50_000
        assert any(steps_within(lambda: tokenizer.encode(text), lambda: steps) for _ in range(50))
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        thread.join(SECONDS)


def steps_within(work, steps) -> int:
    before = steps()
    work()
    return steps() - before


def test_the_longest_token_bounds_what_fits(tokenizer):
    assert tokenizer.longest_token == 2
    for text in ("ag" * 40, "def f():\n" * 9, "cl"):
        tokens = tokenizer.encode(text)
        assert len(text) <= len(tokens) * tokenizer.longest_token


def infer(text: str) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name="tiny")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return request


CALLS = {
    "peagle.v1.Generation/Generate": lambda text: pb.GenerateRequest(text=text),
    "peagle.v1.Generation/GenerateOnce": lambda text: pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
    ),
    f"{vllm.SERVICE}/Generate": lambda text: vllm_engine_pb2.GenerateRequest(text=text),
    f"{open_inference.SERVICE}/ModelInfer": infer,
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
}


def call(server: LiveServer, path: str, text: str) -> str:
    """The message of the refusal with INVALID_ARGUMENT or 400."""
    request = CALLS[path](text)
    if path.startswith("/"):
        answer = server.post(path, **request)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]
    error = send_one(server, path, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    return error.details()


@pytest.mark.parametrize("path", CALLS)
def test_a_text_that_cannot_fit_is_not_tokenised(server, monkeypatch, path):
    monkeypatch.setattr(
        type(server.frontend.tokenizer), "encode", lambda *given, **named: pytest.fail("tokenised")
    )
    for size in (LONGEST + 1, 300_000):
        assert f"characters are more than the {LONGEST}" in call(server, path, "a" * size)


def test_the_hard_limit_holds_where_the_model_could_take_more(tokenizer):
    async def ask():
        encoder = Encoder(tokenizer, Limits(max_prompt_chars=50), max_model_len=96)
        assert len(await encoder.encode("ag" * 25, field="text")) == 25
        with pytest.raises(ServiceError, match="text: 51 characters are more than the 50"):
            await encoder.encode("a" * 51, field="text")
        encoder.close()

    asyncio.run(ask())


def test_a_chat_is_measured_before_the_template_sees_it(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "chat_text", lambda *given: pytest.fail("rendered"))

    async def ask():
        encoder = Encoder(tokenizer, Limits(max_prompt_chars=1000), max_model_len=96)
        talk = [{"role": "user", "content": "a"}]
        for messages, variables in (
            ([{"role": "user", "content": "a" * 1001}], {}),
            ([{"role": "user" * 300, "content": "a"}], {}),
            ([{"role": "user", "content": ""}] * 251, {}),
            (talk, {"effort": "a" * 1000}),
            (talk, {"effort": [{"a" * 1000: 1}]}),
        ):
            with pytest.raises(ServiceError, match="characters are more than the 1000"):
                await encoder.chat(messages, variables, field="chat")
        encoder.close()

    asyncio.run(ask())


LEAVES_OUT = "{% for m in messages[1:] if m.role in ('user', 'assistant') %}"
REFUSES = (
    "{% for m in messages[1:] %}{{ raise_exception('rules come first') if m.role == 'system' }}"
)
TAKES = "{% for m in messages[1:] %}"


@pytest.mark.parametrize(
    ("loop", "role"), [(LEAVES_OUT, "user"), (REFUSES, "user"), (TAKES, "system")]
)
def test_later_messages_of_the_system_reach_the_prompt(tmp_path, loop, role):
    """Claude Code sends rules in such messages."""
    template = (
        f"[{{{{ messages[0].content }}}}]{loop}[{{{{ m.role }}}}:{{{{ m.content }}}}]{{% endfor %}}"
    )
    tokenizer = make_tokenizer(tmp_path, template)
    talk = [("system", "First."), ("user", "Hi"), ("system", " Later. "), ("assistant", "Yo")]
    messages = [{"role": role, "content": content} for role, content in talk]

    async def ask() -> str:
        encoder = Encoder(tokenizer, Limits(), max_model_len=96)
        ids = await encoder.chat(messages, {}, field="messages")
        encoder.close()
        return tokenizer.spell(ids)

    assert asyncio.run(ask()) == f"[First.][user:Hi][{role}: Later. ][assistant:Yo]"


class Held:
    """A tokenizer whose work on long texts goes on until it is released."""

    longest_token = 100
    template_source = ""
    may_take_forever = False

    def __init__(self):
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.running = self.most = self.ended = 0
        self.threads: set[str] = set()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if len(text) <= 4096:
            return [len(text)]
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.threads.add(threading.current_thread().name)
        assert self.released.wait(SECONDS)
        with self.lock:
            self.running -= 1
            self.ended += 1
        return [len(text)]

    encode_in_time = encode

    def chat_text(self, messages, **variables) -> str:
        return "".join(one["content"] for one in messages)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_texts_share_threads_and_delay_no_short_text(threads):
    held = Held()

    async def ask():
        encoder = Encoder(held, Limits(tokenizer_threads=threads), max_model_len=1 << 20)
        chat = lambda text: encoder.chat([{"content": text}], {}, field="chat")
        kinds = (lambda text: encoder.encode(text, field="text"), chat)
        tasks = [
            asyncio.create_task(kinds[i % 2]("a" * 5000)) for i in range(threads + 64)
        ]  # as many wait as may
        await soon(lambda: held.running == threads)
        assert not any(task.done() for task in tasks), "a text was refused"
        for ask in kinds:
            with pytest.raises(ServiceError) as refused:
                await ask("a" * 5000)
            assert refused.value.code is Code.RESOURCE_EXHAUSTED
            assert refused.value.retry_after
            assert await ask("abc") == [3]
        for task in tasks[-10:]:  # their clients leave, and others take their places
            task.cancel()
        await asyncio.gather(*tasks[-10:], return_exceptions=True)
        tasks[-10:] = [asyncio.create_task(kinds[0]("a" * 5000)) for _ in range(10)]
        held.released.set()
        assert await asyncio.gather(*tasks) == [[5000]] * len(tasks)
        encoder.close()

    asyncio.run(asyncio.wait_for(ask(), SECONDS))
    assert held.most == threads
    assert held.ended == threads + 64
    assert not any("MainThread" in name for name in held.threads)


def test_the_event_loop_does_not_wait_for_patterns_of_unknown_authors(tokenizer, monkeypatch):
    """Not even for a short text."""
    is_called, goes_on = threading.Event(), threading.Event()

    def encode(self, text, *, special):
        is_called.set()
        assert goes_on.wait(SECONDS)
        raise ConfigError("the tokenizer failed: it took more than 5 s")

    monkeypatch.setattr(ChatTemplate, "encode", encode)
    monkeypatch.setattr(tokenizer, "may_take_forever", True)

    async def work():
        encoder = Encoder(tokenizer, Limits(), max_model_len=96)
        waiting = asyncio.ensure_future(encoder.encode("ab", field="text"))
        await soon(is_called.is_set)
        goes_on.set()
        with pytest.raises(ServiceError, match="text: the tokenizer failed"):
            await waiting
        encoder.close()

    asyncio.run(work())


def test_a_closed_pool_refuses_all_that_wait():
    held = Held()

    async def close():
        pool = BoundedPool("test", "texts", num_threads=1, max_waiting=3)
        tasks = [asyncio.create_task(pool.run(lambda: held.encode("a" * 5000))) for _ in range(4)]
        await soon(lambda: held.running == 1)
        pool.close()
        held.released.set()
        running, *waiting = await asyncio.wait_for(
            asyncio.gather(*tasks, return_exceptions=True), LIMIT
        )
        assert running == [5000]
        assert [one.code for one in waiting] == [Code.UNAVAILABLE] * 3

    asyncio.run(close())


PROMPTS = {
    "text": dict(text="a" * 5000),
    "chat": dict(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="a" * 5000)])),
}


@pytest.fixture
def hurried(make_engine):
    """A server whose only tokenizer thread is busy until released, and its tokenizer."""
    held = Held()
    limits = Limits(max_request_seconds=0.3, tokenizer_threads=1)
    server = LiveServer(make_engine(), http=True, limits=limits)
    server.call(setattr, server.frontend, "_encoder", Encoder(held, limits, max_model_len=1 << 20))
    yield server, held
    held.released.set()
    server.close()


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("kind", PROMPTS)
def test_time_in_the_tokenizer_counts_towards_the_limit_of_a_request(hurried, kind):
    """That of the text that is tokenised, and that of the text that waits."""
    server, held = hurried
    with server.peagle() as stub:
        calls = [stub.GenerateOnce.future(pb.GenerateRequest(**PROMPTS[kind])) for _ in range(2)]
        for call in calls:
            error = call.exception(timeout=LIMIT)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.details().startswith("the time was up after")
    assert held.running == 1
    assert server.post("/v1/completions", prompt="a" * 5000).status_code == 504


def test_the_time_of_a_streams_request_begins_with_its_message(server, monkeypatch):
    """Its call may be open for hours. The client's own `timeout` begins then too."""
    asks: list[Ask] = []
    open_ask = server.frontend.open
    monkeypatch.setattr(server.frontend, "open", lambda ask: asks.append(ask) or open_ask(ask))
    request = infer("ab")
    request.parameters["timeout"].int64_param = 100_000_000
    messages = queue.SimpleQueue()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(STREAM, response_deserializer=RESPONSE)
        answers = call(iter(messages.get, None), timeout=LIMIT)
        try:
            for _ in range(2):
                sent = time.monotonic()
                messages.put(request.SerializeToString())
                assert next(answers).error_message == ""
                assert sent <= asks[-1].arrival <= time.monotonic()
                assert asks[-1].deadline == asks[-1].arrival + 100
        finally:
            messages.put(None)
        assert list(answers) == []


def test_the_limit_of_a_request_begins_with_its_arrival(hurried):
    server, _ = hurried

    def open_late():
        ask = Ask(
            request_id="late", prompt=[1], params=SamplingParams(), arrival=time.monotonic() - 1
        )
        with pytest.raises(ServiceError, match="the time was up after 1"):
            server.frontend.open(ask)

    server.call(open_late)


def test_closing_waits_for_the_thread_that_loads_the_chat_template(make_engine, monkeypatch):
    """It logs, and the log may be closed after the server."""
    started, released, ended = (threading.Event() for _ in range(3))
    waits = []

    def prepare(tokenizer):
        started.set()
        assert released.wait(LIMIT)
        ended.set()

    real = Encoder.wait_closed

    async def wait_closed(encoder, seconds):
        """Lets the template be loaded only once the server waits for it."""
        wait = asyncio.ensure_future(real(encoder, seconds))
        for _ in range(100):  # turns of the event loop: a wait for nothing would be over
            await asyncio.sleep(0)
        waits.append("waits" if not wait.done() else "is over at once")
        released.set()
        await wait
        waits.append("template loaded" if ended.is_set() else "template not loaded")

    engine = make_engine()
    monkeypatch.setattr(type(engine.tokenizer), "prepare_chat", prepare)
    monkeypatch.setattr(Encoder, "wait_closed", wait_closed)
    server = LiveServer(engine)
    assert started.wait(LIMIT)
    try:
        server.close()
    finally:
        released.set()
    assert waits == ["waits", "template loaded"]


SECONDS = 60  # limit of every wait
