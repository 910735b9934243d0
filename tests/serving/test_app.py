"""From settings to an engine: every size reaches it."""

import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from peagle_jax import EngineConfig
from peagle_jax.cli import runs
from peagle_jax.cli.model_folders import embedded
from peagle_jax.config import ConfigError
from serving.engines import engine_of, make_engine, sized_config
from serving.settings import Settings, read_models, served_name
from tests import tiny
from tests.serving.live import LiveServer
from tests.waiting import LIMIT


def test_every_size_reaches_the_engine():
    sizes = dict(max_num_seqs=3, max_model_len=256, max_waiting=5, prefill_chunk=32)
    sizes |= dict(prefill_rows=2, max_logprobs=1, dtype="bfloat16", kv_cache_dtype="fp8")
    engine = make_engine(Settings(num_speculative_tokens=2, method="eagle3", **sizes))
    assert {name: getattr(engine.config, name) for name in sizes} == sizes
    assert engine.config.num_draft == 2
    assert engine.drafter_config.method == "eagle3"
    assert engine.tokenizer is not None


def test_a_gpu_decodes_more_requests_at_once_unless_the_settings_say_otherwise(monkeypatch):
    slots = lambda **given: sized_config(Settings(dtype="bfloat16", **given)).max_num_seqs
    assert slots() == EngineConfig().max_num_seqs
    monkeypatch.setattr(runs.dispatch, "platform", lambda: "cuda")
    assert (slots(), slots(max_num_seqs=2)) == (64, 2)


@pytest.mark.slow
def test_gpus_prefill_larger_chunks_unless_the_settings_say_otherwise(monkeypatch):
    config = EngineConfig(max_num_seqs=2, max_model_len=256)
    assert runs.prefill_sizes(config) == {}
    monkeypatch.setattr(runs.dispatch, "platform", lambda: "cuda")
    sizes = runs.prefill_sizes(config)
    assert sizes == dict(prefill_chunk=256, prefill_rows=2, small_prefills=True)
    assert runs.prefill_sizes(EngineConfig())["prefill_chunk"] == 512
    monkeypatch.undo()
    monkeypatch.setattr(runs, "prefill_sizes", lambda config: sizes)
    found = lambda **given: {k: getattr(make_engine(Settings(**given)).config, k) for k in sizes}
    assert found() == sizes
    given = dict(prefill_chunk=64, small_prefills=False)
    assert found(**given) == sizes | given


def test_memory_for_keys_and_values_is_a_number_of_pages():
    target, head = tiny.target(**tiny.ONE_LAYER), tiny.head(**tiny.HEAD_OF_ONE_LAYER)

    def pages(memory: str | None) -> int:
        settings = Settings(max_num_seqs=16, max_model_len=64, kv_cache_memory=memory)
        return engine_of(settings, sized_config(settings), target, head).config.total_pages

    bounded, slots = pages("64KiB"), 16 * 64 // 16
    assert bounded < pages(None) == 4 * slots + 1  # on a CPU the cache keeps three times what runs
    assert 0 <= pages("128KiB") - 2 * bounded <= 1
    with pytest.raises(ConfigError, match="kv_cache_memory: 1000 bytes cannot hold one") as caught:
        pages("1kB")
    (least,) = re.findall(r"give (\d+) bytes or more, or lower max_model_len", str(caught.value))
    assert pages(least) == 64 // 16 + 1
    with pytest.raises(ConfigError, match=f"give {least} bytes"):
        pages(str(int(least) - 1))


def test_hub_ids_are_downloaded_and_name_the_model(monkeypatch):
    asked = []

    def download(name, **options):
        asked.append(name)
        return str(embedded("peagle" if "head" in name else "target"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = read_models(Settings(model="some/model", drafter="some/head"))
    assert asked == ["some/model", "some/head"]
    assert (settings.model, settings.drafter) == (str(embedded("target")), str(embedded("peagle")))
    assert served_name(settings) == "some/model"
    assert read_models(Settings()).model is None


@pytest.mark.slow
def test_the_chat_template_is_prepared_once_requests_are_served(make_engine, monkeypatch):
    """Its import would otherwise take a share of the time until the server is ready."""
    order, prepared = [], threading.Event()
    first_rounds = runs.first_rounds

    def recorded(engine):
        first_rounds(engine)
        order.append("programs")

    def prepare(tokenizer):
        order.append("chat")
        prepared.set()

    engine = make_engine()
    monkeypatch.setattr(runs, "first_rounds", recorded)
    monkeypatch.setattr(type(engine.tokenizer), "prepare_chat", prepare)
    server = LiveServer(engine)
    try:
        assert prepared.wait(60)
    finally:
        server.close()
    assert order == ["programs", "chat"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_stopped_while_it_loads(number):
    """Process 1 of a container gets only the signals that it handles.

    Imports run `exec` of strings, where CPython takes a KeyboardInterrupt for unhandled.
    """
    program = (
        "import os, serving.__main__, serving.settings\n"
        f"signalled = 'os.kill(os.getpid(), {int(number)})\\nwhile True: pass'\n"
        "serving.settings.read_models = lambda settings: exec(signalled)\n"
        "serving.__main__.main(['--port', '0', '--http-port', '-1'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT)
    assert ended.returncode == 128 + number, ended.stderr


def serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "serving", "--http-port", "-1", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)


def test_a_port_in_use_is_reported_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve("--port", str(port), "--model", "/no/such/model")
    assert done.returncode == 2
    assert done.stderr == (
        f"peagle-serve: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_missing_files_are_reported_before_loading():
    done = serve("--auth-token-file", "/no/such/tokens", "--model", "/no/such/model")
    assert done.returncode == 2
    assert done.stderr.startswith("peagle-serve: error: /no/such/tokens: cannot read")
    assert done.stderr.count("\n") == 1
