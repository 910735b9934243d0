"""A model that is read by shares is the model that is read whole and then shared out."""

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from convert.__main__ import main
from peagle_jax.checkpoint import load_head, load_target, target_config
from peagle_jax.checkpoint.assembly import FileAssembly, Sharing
from peagle_jax.checkpoint.safetensors import Checkpoint
from peagle_jax.checkpoint.staging import aligned
from peagle_jax.checkpoint.tables import target_layout
from peagle_jax.config import ConfigError
from peagle_jax.devices import Devices
from peagle_jax.parallel.shares import cut_of
from tests.checkpoint import test_streaming
from tests.convert.conftest import GOLDEN, target_of

TARGETS = tuple(name for name in test_streaming.TARGETS if name != "qwen3_moe-fp8")
"""llama-fp8-tensor has biases in the MLP. A share of qwen3_moe-fp8 would cut blocks."""


def check_same(found: nnx.Module, wanted: nnx.Module) -> None:
    pairs = zip(
        jax.tree.leaves_with_path(nnx.state(found)),
        jax.tree.leaves_with_path(nnx.state(wanted)),
        strict=True,
    )
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), path
        assert one.dtype == other.dtype
        for mine, theirs in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert mine.device == theirs.device
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(theirs.data))


@pytest.mark.sampled(3, slow=3)
@pytest.mark.sampled(3, slow=3)
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_shares_of_a_target(name, is_converted, tmp_path):
    folder = GOLDEN / name
    if is_converted:
        assert main(["convert", str(folder), str(tmp_path / "made")]) == 0
        folder = tmp_path / "made"
    devices = Devices(2)
    whole = devices.placed(load_target(folder, dtype="bfloat16"))
    check_same(load_target(folder, dtype="bfloat16", devices=devices), whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["peagle-pruned", "eagle31"])
def test_shares_of_a_head(name):
    target, devices = target_config(target_of(name)), Devices(2)
    whole = devices.placed(load_head(GOLDEN / name, target, dtype="float32"))
    check_same(load_head(GOLDEN / name, target, dtype="float32", devices=devices), whole)


def test_quantising_while_loading_keeps_the_blocks_of_the_whole_matrix():
    folder, devices = GOLDEN / "qwen3_moe-bf16", Devices(2)
    with pytest.raises(ConfigError, match="blocks of 128 rows or columns"):
        load_target(folder, dtype="bfloat16", quantization="fp8", devices=devices)


def test_a_device_reads_its_own_experts_only():
    """Two processes of one device each read half of the experts' bytes, together all."""
    checkpoint = Checkpoint(GOLDEN / "qwen3_moe-bf16")
    config = target_config(GOLDEN / "qwen3_moe-bf16")
    read = {0: set(), 1: set()}
    for rule in target_layout(config, checkpoint.tensors).rules:
        if rule.path[-2] not in ("gate_up", "down") or ".experts." not in rule.names[0]:
            continue
        shape = rule.transform.shape([checkpoint.tensors[name].shape for name in rule.names])
        cut = cut_of(config, rule.path, shape, shape, 2)
        for rank, names in read.items():
            sharing = Sharing(cut, [rank], 2)
            assembly = FileAssembly(checkpoint, rule, np.dtype(ml_dtypes.bfloat16), sharing)
            names.update(span.name for span in assembly.spans(aligned(assembly.nbytes)))
    assert read[0]
    assert not read[0] & read[1]
    assert read[0] | read[1] == {name for name in checkpoint.tensors if ".experts." in name}
