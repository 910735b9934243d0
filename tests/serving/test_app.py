"""From settings to an engine: every size reaches it."""

import os
import signal
import subprocess
import sys

import pytest

from peagle_jax.config import ConfigError
from serving.app import make_engine, served_name
from serving.settings import Settings


def test_every_size_reaches_the_engine():
    sizes = dict(
        max_num_seqs=3, max_model_len=256, max_waiting=5, prefill_chunk=32, prefill_rows=2,
        max_logprobs=1, dtype="bfloat16", kv_cache_dtype="fp8",
    )  # fmt: skip
    engine = make_engine(Settings(num_speculative_tokens=2, method="eagle3", **sizes))
    assert {name: getattr(engine.config, name) for name in sizes} == sizes
    assert engine.config.num_draft == 2
    assert engine.drafter_config.method == "eagle3"
    assert engine.tokenizer is not None


def test_memory_for_keys_and_values_is_a_number_of_pages():
    pages = lambda memory: (
        make_engine(
            Settings(max_num_seqs=16, max_model_len=64, kv_cache_memory=memory)
        ).config.total_pages
    )
    bounded = pages("4MiB")
    assert bounded < pages(None) == 16 * 64 // 16 + 1
    assert 0 <= pages("8MiB") - 2 * bounded <= 1
    with pytest.raises(ConfigError, match="kv_cache_memory='1kB' makes 0 pages"):
        pages("1kB")


def test_plain_decoding_has_no_drafts():
    engine = make_engine(Settings(method="none"))
    assert (engine.config.num_draft, engine.drafter_config) == (0, None)


def test_the_name_is_the_folders_unless_given(tmp_path):
    assert served_name(Settings()) == "embedded"
    assert served_name(Settings(model=str(tmp_path / "qwen3-8b") + "/")) == "qwen3-8b"
    assert served_name(Settings(model=str(tmp_path), served_model_name="mine")) == "mine"


def test_it_can_be_stopped_while_it_loads(tmp_path):
    """Process 1 of a container gets only the signals that it handles."""
    os.mkfifo(tmp_path / "config.json")  # whoever reads it waits for a writer
    command = [
        sys.executable,
        "-m",
        "serving",
        "--model",
        str(tmp_path),
        "--port",
        "0",
        "--http-port",
        "-1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while b"no-cache" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 130
