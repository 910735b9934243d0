"""A tiny model behind a live server, shared by the tests of a file."""

import anthropic
import pytest

from peagle_jax import Engine, EngineConfig
from peagle_jax.text.tokenizer import Tokenizer
from tests import programs, tiny
from tests.serving.live import LiveServer
from tests.serving.scripted import TEMPLATE, Scripted, make_tokenizer
from tests.serving.scripted import make_engine as make_scripted_engine
from tests.vocabularies import END, json_tokenizer, letter_tokenizer
from tests.waiting import LIMIT

EOS_IDS = (126, 127)
SIZES = dict(num_draft=3, max_num_seqs=4, max_model_len=96, page_size=4, prefill_chunk=16)
SIZES |= dict(prefill_rows=2, max_waiting=64, max_logprobs=3)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared():
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def target():
    return tiny.target(eos_ids=EOS_IDS, **tiny.ONE_LAYER)


@pytest.fixture(scope="session")
def make_engine(target, tokenizer):
    """Makes engines of the tiny model, of one batch size unless K goes by load."""

    def make(*, head=True, with_tokenizer=True, times=None, **sizes) -> Engine:
        kind = EngineConfig if "adaptive" in sizes else programs.OneBucketConfig
        config = kind(**(SIZES | sizes))
        drafter = tiny.head(**tiny.HEAD_OF_ONE_LAYER) if head else None
        tokens = tokenizer if with_tokenizer else None
        return Engine(target, drafter, config, tokenizer=tokens, times=times)

    return make


@pytest.fixture(scope="session")
def make_json_engine(tmp_path_factory):
    """Makes engines of a tiny model for texts in JSON, which has 32 more ids than its tokenizer."""
    tokenizer = json_tokenizer(tmp_path_factory.mktemp("json"))
    wide = dict(vocab_size=tokenizer.vocab_size + 32)
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER, draft_vocab_size=tokenizer.vocab_size, **wide)
    target = tiny.target(eos_ids=(tokenizer.added[END],), **tiny.ONE_LAYER, **wide)
    config = programs.OneBucketConfig(**SIZES | dict(max_model_len=192))
    return lambda: Engine(target, head, config, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def live(make_engine) -> LiveServer:
    """A server that stays up for the file; whatever a test does, it must be empty afterwards."""
    with LiveServer(make_engine(), http=True, with_reflection=True) as server:
        yield server


@pytest.fixture
def server(live) -> LiveServer:
    """The shared server; the test must leave it empty."""
    yield live
    live.check_empty()


@pytest.fixture(scope="module")
def http(live):
    """A client of the shared server's HTTP port."""
    with live.client() as client:
        yield client


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Scripted:
    """A server whose model emits the replies that a test gives."""
    server = Scripted(tmp_path_factory.mktemp("scripted"))
    yield server
    server.live.close()


@pytest.fixture
def client(scripted):
    """OpenAI's client of the scripted server; the test must leave the server empty."""
    with scripted.live.openai() as client:
        yield client
    scripted.live.check_empty()


@pytest.fixture
def claude(scripted):
    """Anthropic's client of the scripted server; the test must leave the server empty."""
    url = f"http://{scripted.live.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=LIMIT) as made:
        yield made
    scripted.live.check_empty()


@pytest.fixture(scope="module")
def tools_client(tmp_path_factory):
    """OpenAI's client of a server with tools in its chat template; tests leave it empty."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)
    server = LiveServer(make_scripted_engine(tokenizer), http=True)
    with server.openai() as client:
        yield client
    server.check_empty()
    server.close()


@pytest.fixture(scope="module")
def alone(make_engine):
    """An engine of its own, for what the server should say."""
    return make_engine()


@pytest.fixture
def pace(server):
    """Rounds begin only when the test releases them, so a request can be caught while it runs."""
    with server.paced() as pace:
        yield pace
