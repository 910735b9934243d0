"""What a loaded model holds: weights quantised on request, files written back."""

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import formats
from peagle_jax.checkpoint import Checkpoint, CheckpointError, load_target, save_target
from peagle_jax.checkpoint.tables import target_layout
from peagle_jax.config import ConfigError
from tests import tiny
from tests.golden.folders import GOLDEN, config, tensors, written

QUANTIZED = ("gpt_oss-mxfp4", "qwen3_moe-fp8", "qwen3-fp8-channel", "llama-fp8-tensor")
PLAIN = ("llama", "qwen3", "gpt_oss-bf16", "qwen3_moe-bf16", "gemma4")


def leaves(model: nnx.Module) -> dict[tuple, jax.Array]:
    return {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.sampled(3, slow=1)
@pytest.mark.parametrize("name", PLAIN)
def test_an_unquantised_model_is_written_with_its_own_tensors(name, tmp_path):
    """Those of the other towers aside: only the text model is kept."""
    model = load_target(GOLDEN / name, dtype="float32")
    original = Checkpoint(GOLDEN / name)
    dtype = "float32" if name in ("llama", "qwen3") else "bfloat16"
    save_target(model, tmp_path, dtype=dtype)
    written = Checkpoint(tmp_path)
    names = {n.replace("language_model.", "") for n in original.names()}
    dropped = target_layout(model.config, original.tensors).dropped
    assert set(written.names()) == names - set(dropped)
    for n in written.names():
        source = n if n in original else n.replace("model.", "model.language_model.")
        assert written.read(n).tobytes() == original.read(source).tobytes()
    again = load_target(tmp_path, dtype="float32")
    assert again.config == model.config
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("family", tiny.TARGETS)
def test_every_family_can_be_saved_and_loaded(family, tmp_path):
    changes = dict(tiny.TARGETS[family])
    if family == "gemma4":  # a file states one window
        changes["sliding_windows"] = (6, 6, None)
    model = tiny.target(**changes)
    save_target(model, tmp_path, dtype="float32")
    again = load_target(tmp_path, dtype="float32")
    assert again.config == model.config
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_model_can_be_saved_over_the_file_it_was_loaded_from(tmp_path):
    """Its parameters may be views of that file."""
    save_target(tiny.target(), tmp_path, dtype="float32")
    model = load_target(tmp_path, dtype="float32")
    before = [np.array(x) for x in jax.tree.leaves(model)]
    save_target(tiny.target(seed=5, num_layers=4), tmp_path, dtype="float32")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(model), before, strict=True))
    save_target(model, tmp_path, dtype="float32")
    again = jax.tree.leaves(load_target(tmp_path, dtype="float32"))
    assert all(np.array_equal(a, b) for a, b in zip(again, before, strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_windows_of_two_widths_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds one sliding window; the model has \[5, 6\]"):
        save_target(tiny.target(sliding_windows=(6, None, 5)), tmp_path)


def test_a_quantised_model_is_not_saved_as_if_it_were_not(tmp_path):
    model = load_target(GOLDEN / "qwen3-fp8-channel", dtype="float32")
    with pytest.raises(CheckpointError, match="a quantised model cannot be saved"):
        save_target(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(3, slow=1)
@pytest.mark.parametrize("name", PLAIN)
def test_matrices_are_quantised_on_the_way_in(name):
    plain = leaves(load_target(GOLDEN / name, dtype="float32"))
    model = load_target(GOLDEN / name, dtype="bfloat16", quantization="fp8")
    arrays = leaves(model)
    scaled = {path[-2] for path in arrays if path[-1] == "scale"}
    assert scaled == {"qkv", "out", "gate_up", "down"}
    for path, array in arrays.items():
        if path[-1] == "scale":
            assert array.dtype == jnp.float32
        elif (*path[:-1], "scale") in arrays and path[-1] == "weight":
            assert array.dtype == jnp.float8_e4m3fn
            got = formats.dequantize(array, arrays[(*path[:-1], "scale")], jnp.float32)
            error = np.abs(got - plain[path]) / np.abs(plain[path]).max()
            assert error.max() < 2**-4
        else:
            assert array.dtype == jnp.bfloat16
            np.testing.assert_array_equal(array, plain[path].astype(jnp.bfloat16))


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_quantised_is_not_quantised_again(name):
    with pytest.raises(CheckpointError, match="quantised already; load it without") as caught:
        load_target(GOLDEN / name, dtype="float32", quantization="fp8")
    assert name in str(caught.value)


def test_only_known_quantisations_are_taken():
    with pytest.raises(ConfigError, match="quantization='int4' is not supported; 'fp8' is"):
        load_target(GOLDEN / "qwen3", dtype="float32", quantization="int4")


def test_a_weight_without_an_fp8_form_is_refused_by_its_name(tmp_path):
    broken = np.full((48, 64), np.nan, np.float32)
    copy_of("llama", tmp_path, model__layers__2__mlp__up_proj__weight=broken)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.gate_up\.weight: .*no fp8 form"):
        load_target(tmp_path, dtype="float32", quantization="fp8")


def copy_of(name: str, folder: Path, **changed) -> Path:
    """A golden folder with other tensors."""
    changed = {n.replace("__", "."): x for n, x in changed.items()}
    return written(folder, config(name), tensors(name) | changed)


BIAS = dict(model__layers__1__self_attn__q_proj__bias=np.zeros(64, np.float32))
REFUSED = {
    "biases the config does not state": ({}, BIAS, "without a place in llama"),
    "biases the file does not hold": ({"attention_bias": True}, {}, "q_proj.bias' is missing"),
    "biases of an MLP": ({"mlp_bias": True}, {}, "_proj.bias' is missing"),
    "no width": ({"hidden_size": None}, {}, r"does not state hidden_size \(4096\)"),
    "no depth": ({"num_hidden_layers": None}, {}, r"does not state num_hidden_layers \(32\)"),
    "more layers than the file": ({"num_hidden_layers": 9}, {}, "is missing"),
    "fewer layers than the file": ({"num_hidden_layers": 7}, {}, "without a place"),
    "another vocabulary": ({"vocab_size": 200}, {}, "has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_would_not_compute_what_they_should_are_refused(case, tmp_path):
    changes, changed, message = REFUSED[case]
    copy_of("llama", tmp_path, **changed)
    (tmp_path / "config.json").write_text(json.dumps(config("llama") | changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(tmp_path, dtype="float32")
    assert str(tmp_path) in str(caught.value)


def test_no_more_than_one_parameter_is_held_beside_the_model(tmp_path):
    """Experts are the largest parameters: joined one by one, never all at once."""
    changes = dict(tiny.FAMILIES["qwen3_moe"], num_layers=8, intermediate_size=256, hidden_size=64)
    model = tiny.target(dtype="bfloat16", **changes)
    save_target(model, tmp_path)
    largest = max(x.nbytes for x in jax.tree.leaves(model))
    total = sum(x.nbytes for x in jax.tree.leaves(model))
    del model
    load_target(tmp_path, dtype="bfloat16")
    tracemalloc.start()
    again = load_target(tmp_path, dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = sum(x.nbytes for x in jax.tree.leaves(again))
    assert held == total
    assert peak < total + 2 * largest + 2**20
