"""Logits against PyTorch: skipped without it, and with a stand-in for it able to pass and to fail."""

import importlib.machinery
import sys
import types
from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from convert import logits
from peagle_jax.checkpoint import load_target
from tests.convert.conftest import GOLDEN
from tests.tiny import causal_attention


class Tensor:
    def __init__(self, array):
        self.array = np.asarray(array)

    def numpy(self) -> np.ndarray:
        return self.array


class Model:
    """Our own model where transformers' would be; `error` is added to its first logit."""

    error = 0.0

    def __init__(self, folder):
        self.model = load_target(folder, dtype="float32")

    @classmethod
    def from_pretrained(cls, folder, **options):
        assert options["attn_implementation"] == "eager"
        return cls(folder)

    def float(self):
        return self

    eval = float

    def __call__(self, tokens: Tensor):
        ids = jnp.asarray(tokens.array, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        last, _, _ = self.model(ids, positions, [None] * len(self.model.layers), causal_attention)
        out = np.array(self.model.unembed(last))
        out[0, 0, 0] += self.error
        return types.SimpleNamespace(logits=Tensor(out))


@pytest.fixture
def torch(monkeypatch):
    fake = types.ModuleType("torch")
    fake.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    fake.float32, fake.no_grad, fake.from_numpy = "float32", nullcontext, Tensor
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Model)


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(
    "name", ["llama", "gpt_oss-mxfp4", "qwen3_moe-fp8", "qwen3-fp8-channel", "llama-fp8-tensor"]
)
def test_logits_are_compared_where_torch_is(name, torch, cli, tmp_path, monkeypatch):
    cli("convert", GOLDEN / name, tmp_path / "dst")
    code, out, err = cli("verify", GOLDEN / name, tmp_path / "dst")
    assert (code, err) == (0, "")
    assert "logits against PyTorch at 48 positions: largest difference" in out
    if not name.endswith(("fp8", "channel", "tensor")):  # those were dequantised for the other side
        assert "largest difference 0 of the largest" in out
    assert "likeliest token equal at 100%" in out
    monkeypatch.setattr(Model, "error", 5.0)
    code, out, _ = cli("verify", GOLDEN / name, tmp_path / "dst")
    assert code == 1


def test_without_torch_the_rest_is_verified(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    cli("convert", GOLDEN / "llama", tmp_path / "dst")
    code, out, _ = cli("verify", GOLDEN / "llama", tmp_path / "dst")
    assert code == 0
    assert "every bit is right" in out
    assert "logits against PyTorch: skipped (torch is not installed)" in out


@pytest.mark.parametrize("fails", ["from_pretrained", "__call__"])
def test_a_model_that_transformers_cannot_run_is_verified_by_its_bits(
    fails, torch, cli, tmp_path, monkeypatch
):
    def fail(*args, **options):
        raise ImportError("Using `accelerate` is required.\nInstall it.")

    cli("convert", GOLDEN / "gpt_oss-mxfp4", tmp_path / "dst")
    monkeypatch.setattr(Model, fails, fail)
    code, out, err = cli("verify", GOLDEN / "gpt_oss-mxfp4", tmp_path / "dst")
    assert (code, err) == (0, "")
    assert "every bit is right" in out
    assert "logits not compared: ImportError: Using `accelerate` is required.\n" in out


def test_heads_and_models_that_do_not_fit_are_skipped(torch, monkeypatch):
    assert logits.why_skipped("head", 10) == "logits are compared for targets only"
    assert logits.why_skipped("target", 10) is None
    assert logits.free_memory() > 0
    monkeypatch.setattr(logits, "free_memory", lambda: 8_000_000_000)
    assert logits.why_skipped("target", 8_000_000_000) == (
        "both models in float32 need 80 GB, 8 GB are free"
    )
