"""OpenAI's client, the smg gateway, `vllm.grpc.engine.VllmEngine`, the embedded model."""

import openai
import pytest

from peagle_jax import SamplingParams
from peagle_jax.cli.loading import load
from tests.programs import OneBucketConfig
from tests.serving.gateway import running_gateway
from tests.serving.live import LiveServer
from tests.waiting import LIMIT

pytestmark = pytest.mark.slow
MODEL = "embedded"
PROMPT = "def quicksort(xs):"
SHORT = dict(model=MODEL, max_tokens=40, temperature=0)
SIZES = OneBucketConfig(
    num_draft=5, max_num_seqs=4, max_model_len=256, prefill_chunk=32, max_waiting=64
)


@pytest.fixture(scope="module")
def live():
    with LiveServer(load(config=SIZES), name=MODEL) as server:
        yield server


@pytest.fixture
def server(live):
    """The test must leave it empty."""
    yield live
    live.check_empty()


@pytest.fixture(scope="module")
def gateway(live, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smg")
    with running_gateway([live.address], folder, MODEL, "--disable-retries") as url:
        yield url


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=gateway, api_key="none", max_retries=0, timeout=LIMIT) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The text of a separate engine."""
    engine = load(config=SIZES)
    return engine.generate([PROMPT], SamplingParams(max_tokens=40))[0]


def check_usage(usage, expected) -> None:
    """Token ids and the counts of speculation."""
    assert usage.prompt_tokens == len(expected.prompt)
    assert usage.completion_tokens == len(expected.tokens)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == expected.accepted > 0
    assert details.rejected_prediction_tokens == expected.drafted - expected.accepted


def user(text: str) -> list[dict]:
    return [dict(role="user", content=text)]


def test_a_completion_equals_the_engines_output(server, client, expected):
    completion = client.completions.create(prompt=PROMPT, **SHORT)
    assert completion.choices[0].text == expected.text
    assert completion.choices[0].finish_reason == "length"
    check_usage(completion.usage, expected)


def test_a_chat_continues_the_last_message(server, client, expected):
    chat = client.chat.completions.create(messages=user(PROMPT), **SHORT)
    assert chat.choices[0].message.content == expected.text
    check_usage(chat.usage, expected)
    first, _, second = "import os\n\n\ndef main():".partition("\n")
    talk = [dict(role="system", content=first), *user(second)]
    joined = client.completions.create(prompt=f"{first}\n{second}", **SHORT)
    chat = client.chat.completions.create(messages=talk, **SHORT)
    assert chat.choices[0].message.content == joined.choices[0].text


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streams_are_the_same_in_pieces(server, client, expected, kind):
    options = SHORT | dict(stream=True, stream_options=dict(include_usage=True))
    with server.unmerged():
        if kind == "chat":
            chunks = list(client.chat.completions.create(messages=user(PROMPT), **options))
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        else:
            chunks = list(client.completions.create(prompt=PROMPT, **options))
            pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert sum(map(bool, pieces)) > 3
    assert "".join(piece or "" for piece in pieces) == expected.text
    check_usage(chunks[-1].usage, expected)


def test_leaving_a_stream_frees_its_pages(server, client):
    options = SHORT | dict(max_tokens=230, temperature=1, extra_body=dict(ignore_eos=True))
    streams = [client.completions.create(prompt=PROMPT, stream=True, **options) for _ in range(3)]
    next(iter(streams[0]))
    assert server.call(lambda: server.frontend.load.pages_used) > 0
    rounds = server.frontend.load.rounds
    for stream in streams:
        stream.close()
    server.check_empty()
    assert server.frontend.load.rounds - rounds < 100
