"""What `plan` says, and how parameters are meant to lie on a mesh."""

import json

import jax
import pytest
from flax import nnx

from peagle_jax.checkpoint import Checkpoint, load_target
from peagle_jax.devices import Devices
from tests.convert.conftest import GOLDEN, checkpoints

CHECKPOINTS = checkpoints()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_of_a_checkpoint_has_a_row(name, cli):
    folder, options = CHECKPOINTS[name]
    code, out, err = cli("plan", folder, *options, "--json")
    assert (code, err) == (0, "")
    *rows, last = map(json.loads, out.splitlines())
    tensors = Checkpoint(folder).tensors
    assert sorted(row["tensor"] for row in rows) == sorted(tensors)
    for row in rows:
        assert tuple(row["shape"]) == tensors[row["tensor"]].shape
        assert row["path"]
    summary = last["summary"]
    assert summary["tensors"] == len(tensors)
    assert summary["leftovers"] == summary["missing"] == []
    assert summary["parameters"] == len({row["path"] for row in rows})


def test_a_plan_is_readable(cli):
    code, out, _ = cli("plan", GOLDEN / "qwen3_moe-fp8")
    assert code == 0
    lines = out.splitlines()
    assert (
        "model.layers.1.mlp.experts.0.gate_proj.weight  F8_E4M3 [8, 136]  stack experts -> "
        "layers.1.mlp.gate_up.weight [4, 2, 8, 136]"
    ) in lines
    assert (
        "model.layers.0.self_attn.o_proj.weight_scale_inv  BF16 [2, 2]  join scales -> "
        "layers.0.attention.out.scale [2, 2]"
    ) in lines
    code, out, _ = cli("plan", GOLDEN / "llama-fp8-tensor")
    assert "unused.0 []  (not used: activations are not quantised)" in out


@pytest.mark.parametrize("name", ["qwen3_moe-bf16", "gpt_oss-mxfp4", "gemma4", "llama"])
def test_the_bytes_of_a_device_are_those_that_loading_puts_there(name, cli):
    code, out, _ = cli("plan", GOLDEN / name, "--tensor-parallel", "2", "--json")
    assert code == 0
    said = json.loads(out.splitlines()[-1])["summary"]["bytes_per_device"]
    model = load_target(GOLDEN / name, dtype="bfloat16", devices=Devices(2))
    held = [leaf.addressable_shards[1].data.nbytes for leaf in jax.tree.leaves(nnx.state(model))]
    stored = [info.dtype for info in Checkpoint(GOLDEN / name).tensors.values()]
    if all(dtype.itemsize <= 2 for dtype in stored):  # loading casts float32 to bfloat16
        assert said == sum(held)
    else:
        assert sum(held) <= said
