"""Parameters that threads read equal those joined one by one; failures of threads are clear."""

import shutil
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoint import Checkpoint, CheckpointError, load_target, reads, streaming
from peagle_jax.checkpoint.assembly import FileAssembly, Sharing, cast_into, stored_dtype
from peagle_jax.checkpoint.converted import joined
from peagle_jax.checkpoint.staging import Staging
from peagle_jax.checkpoint.tables import target_layout
from tests.convert.conftest import GOLDEN

BF16 = np.dtype(ml_dtypes.bfloat16)
TARGETS = (
    "gemma4",
    "gpt_oss-bf16",
    "gpt_oss-mxfp4",
    "llama",
    "llama-fp8-tensor",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-fp8-channel",
    "qwen3_moe-bf16",
    "qwen3_moe-fp8",
)


@pytest.fixture
def small_reads(monkeypatch):
    """Every tensor takes several reads, and every parameter several groups and uploads."""
    monkeypatch.setattr(reads, "MOST_BYTES", 1 << 10)
    monkeypatch.setattr(streaming, "_MOST_BYTES", 1 << 16)
    monkeypatch.setattr(streaming, "_MOST_UPLOADING", 1 << 14)
    monkeypatch.setattr(streaming, "_GROUP_BYTES", (1 << 12, 1 << 14))


def joined_parameters(name: str, config, dtype: str) -> dict[tuple, np.ndarray]:
    checkpoint = Checkpoint(GOLDEN / name)
    found = {}
    for rule in target_layout(config, checkpoint.tensors).rules:
        array = joined(checkpoint, rule)
        found[rule.path] = array.astype(stored_dtype(array.dtype, rule.path[-1], dtype))
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_bit_is_that_of_the_joined_tensors(name, dtype, small_reads):
    model = load_target(GOLDEN / name, dtype=dtype)
    found = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    wanted = joined_parameters(name, model.config, dtype)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert (found[path].dtype, found[path].shape) == (array.dtype, array.shape), path
        assert np.asarray(found[path]).tobytes() == array.tobytes(), path


@pytest.mark.parametrize("name", TARGETS)
def test_memory_that_is_used_again_belongs_to_no_array_that_waits(name, small_reads):
    """As on an accelerator: arrays are copies, and later groups overwrite the host's memory."""
    checkpoint, found = Checkpoint(GOLDEN / name), {}
    model = load_target(GOLDEN / name, dtype="float32")
    wanted = joined_parameters(name, model.config, "float32")
    assemblies = [
        FileAssembly(checkpoint, rule, wanted[rule.path].dtype, Sharing())
        for rule in target_layout(model.config, checkpoint.tensors).rules
    ]

    def put(assembly):
        found[assembly.rule.path] = jax.numpy.array(assembly.shares[0], copy=True)
        return found[assembly.rule.path]

    streaming.stream(assemblies, put, is_copied=True)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert np.asarray(found[path]).tobytes() == array.tobytes(), path


def test_a_bfloat16_is_widened_to_its_own_bits():
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    out = np.empty(1 << 16, np.float32)
    cast_into(out, every)
    assert out.tobytes() == every.astype(np.float32).tobytes()


def num_readers() -> int:
    return sum(thread.name.startswith("weights") for thread in threading.enumerate())


def test_a_file_that_shrinks_while_it_is_read_is_named_once(tmp_path, small_reads, monkeypatch):
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    file = folder / "model.safetensors"
    add = streaming._Pipeline.add

    def shrink(self, group):
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
        monkeypatch.setattr(streaming._Pipeline, "add", add)
        add(self, group)

    monkeypatch.setattr(streaming._Pipeline, "add", shrink)
    with pytest.raises(CheckpointError, match=r"truncated: it ends at byte \d+, inside") as caught:
        load_target(folder, dtype="float32")
    assert str(caught.value).count(str(folder)) == 1
    assert not num_readers()


def test_an_error_of_the_disk_is_one_line(monkeypatch):
    def fail(descriptor, views, at):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reads.os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read at byte \d+: Input/output error"):
        load_target(GOLDEN / "llama", dtype="float32")
    assert not num_readers()


def test_an_interrupt_ends_the_threads():
    checkpoint = Checkpoint(GOLDEN / "llama")
    config = load_target(GOLDEN / "llama", dtype="float32").config
    assemblies = [
        FileAssembly(checkpoint, rule, np.dtype(np.float32), Sharing())
        for rule in target_layout(config, checkpoint.tensors).rules
    ]

    def put(assembly):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streaming.stream(assemblies, put, is_copied=True)
    assert not num_readers()


def test_memory_comes_back_and_is_bounded():
    staging = Staging(is_reused=True, most=64 << 20)
    _, first = staging.take([10 << 20, 5])
    staging.give_back(first)
    parts, second = staging.take([12 << 20])
    assert second is first
    assert parts[0].nbytes == 12 << 20
    staging.give_back(second)
    _, large = staging.take([60 << 20])
    assert large is not first
    assert staging.kept_bytes == 0
