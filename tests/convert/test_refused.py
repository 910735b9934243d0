"""Every bad input is one line on stderr and exit code 2, and no output folder exists."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from convert import source
from convert.partial import JOURNAL, opened
from convert.plan import make_plan
from convert.source import open_source
from convert.stream import convert
from peagle_jax.checkpoint import Checkpoint, CheckpointError
from peagle_jax.checkpoint.converted import Converted
from peagle_jax.checkpoint.safetensors import INDEX, write
from peagle_jax.cli.model_folders import embedded
from tests.convert.conftest import GOLDEN


def refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), (out, err)
    assert err.startswith("peagle-convert: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in parts:
        assert part in err


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_header(path: Path, change) -> None:
    """Changes a file's header in place; the tensors' bytes stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    os.truncate(shards(folder)[1], shards(folder)[1].stat().st_size - 1)


def bad_header_length(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as file:
        file.write((2**60).to_bytes(8, "little"))


def unknown_dtype(folder: Path) -> None:
    edit_header(shards(folder)[2], lambda header: header["model.norm.weight"].update(dtype="F7"))


def wrong_dtype(folder: Path) -> None:
    """Readable, but no number format for a norm."""
    edit_header(shards(folder)[2], lambda header: header["model.norm.weight"].update(dtype="I16"))


def missing_shard(folder: Path) -> None:
    shards(folder)[2].unlink()


def index_names_a_missing_tensor(folder: Path) -> None:
    edit_index(folder, lambda weights: weights.update({"model.extra": shards(folder)[0].name}))


def duplicate_tensors(folder: Path) -> None:
    first, second = (_names(path)[0] for path in shards(folder)[:2])

    def rename(header):
        header[first] = header.pop(second)

    edit_header(shards(folder)[1], rename)


def _names(path: Path) -> list[str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def path_out_of_the_folder(folder: Path) -> None:
    shutil.copy(shards(folder)[0], folder.parent / "outside.safetensors")
    edit_index(folder, lambda weights: weights.update({"lm_head.weight": "../outside.safetensors"}))


def other_shape(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"hidden_size": 128}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unsupported_model(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "mamba"}))


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (truncate, ["truncated", "model-00002-of-00003.safetensors"]),
        (bad_header_length, ["not a safetensors file", "header length"]),
        (unknown_dtype, ["model.norm.weight", "F7"]),
        (wrong_dtype, ["model.norm.weight", "int16"]),
        (missing_shard, ["model-00003-of-00003.safetensors", "missing"]),
        (index_names_a_missing_tensor, ["model.extra"]),
        (duplicate_tensors, ["is also in model-00001-of-00003.safetensors"]),
        (path_out_of_the_folder, ["../outside.safetensors", "not a file beside it"]),
        (other_shape, ["shape", "config"]),
        (no_config, ["no config.json"]),
        (unsupported_model, ["mamba", "not supported"]),
    ],
)
@pytest.mark.parametrize("command", ["convert", "plan"])
def test_a_broken_checkpoint_is_refused_before_anything_is_written(
    spoil, parts, command, cli, sharded, tmp_path
):
    spoil(sharded)
    where = [tmp_path / "new" / "dst"] if command == "convert" else []
    refused(cli(command, sharded, *where), *parts)
    assert not (tmp_path / "new").exists()


def test_what_is_left_over_or_missing_is_listed_and_nothing_is_written(cli, tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "src")
    checkpoint = Checkpoint(tmp_path / "src")
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}
    tensors["model.layers.0.surprise"] = tensors.pop("model.norm.weight")
    write(tmp_path / "src" / "model.safetensors", tensors)
    for command in (["plan", tmp_path / "src"], ["convert", tmp_path / "src", tmp_path / "dst"]):
        code, _, err = cli(*command)
        assert code == 1
        assert "1 tensors without a place in the model: model.layers.0.surprise" in err
        assert "1 tensors that the model needs and no file holds: model.norm.weight" in err
    assert "LEFT OVER" in cli("plan", tmp_path / "src")[1]
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.partial").exists()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["convert", "SRC"], ["DST"]),
        (["convert", "SRC", "DST", "--max-in-flight", "much"], ["'much' is no number of bytes"]),
        (["plan", "HEAD"], ["draft head", "--target DIR"]),
        (["plan", "HEAD", "--target", "EMBEDDED"], ["the head does not fit the target"]),
        (["verify", "SRC", "SRC"], ["manifest.json"]),
        (["export", "SRC", "DST"], ["manifest.json"]),
        (["synthetic", "qwen3-8b", "DST", "--quantization", "mxfp4"], ["a form of gpt_oss"]),
        (["synthetic", "gpt-oss-20b", "DST", "--quantization", "fp8"], ["no fp8 form"]),
        (["synthetic", "gpt-oss-20b", "SRC"], ["exists"]),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(argv, parts, cli, sharded, tmp_path):
    names = {
        "SRC": sharded,
        "DST": tmp_path / "dst",
        "HEAD": GOLDEN / "peagle-1",
        "EMBEDDED": embedded("target"),
    }
    code, out, err = cli(*(names.get(word, word) for word in argv))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    assert not (tmp_path / "dst").exists()


def test_a_folder_in_use_is_left_alone(cli, sharded, tmp_path):
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "mine").write_text("kept")
    refused(cli("convert", sharded, dst), "exists and is not empty")
    assert [path.name for path in dst.iterdir()] == ["mine"]
    refused(cli("convert", sharded, dst / "mine"), "exists and is not empty")


def test_an_empty_folder_is_filled_and_the_same_conversion_is_not_done_twice(
    cli, sharded, tmp_path
):
    dst = tmp_path / "dst"
    dst.mkdir()
    assert cli("convert", sharded, dst)[0] == 0
    before = (dst / "manifest.json").stat().st_mtime_ns
    code, out, _ = cli("convert", sharded, dst)
    assert code == 0
    assert "already" in out
    assert (dst / "manifest.json").stat().st_mtime_ns == before
    refused(cli("convert", GOLDEN / "llama", dst), "exists and is not empty")


def test_two_runs_do_not_write_one_folder(cli, sharded, tmp_path):
    with opened(tmp_path / "dst"):
        refused(cli("convert", sharded, tmp_path / "dst"), "another run is writing it")
    assert not (tmp_path / "dst.partial").exists()
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0


def test_too_little_room_is_said_before_writing(cli, sharded, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(cli("convert", sharded, tmp_path / "dst"), "GB are needed and 0.0 GB are free")
    assert not (tmp_path / "dst").exists()


def test_a_disk_that_fills_up_leaves_no_final_name_and_the_run_can_go_on(
    cli, sharded, tmp_path, monkeypatch
):
    copy, room = source._copy, 700_000

    def until_full(*args):
        nonlocal room
        room -= args[-1]
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(*args)

    monkeypatch.setattr(source, "_copy", until_full)
    small = ("--group-size", "300KB")
    result = cli("convert", sharded, tmp_path / "dst", *small)
    refused(result, "No space left on device", "what is finished is kept")
    assert not (tmp_path / "dst").exists()
    monkeypatch.setattr(source, "_copy", copy)
    code, out, _ = cli("convert", sharded, tmp_path / "dst", *small)
    assert code == 0
    assert "made before" in out
    assert cli("verify", sharded, tmp_path / "dst", "--no-logits")[0] == 0


def test_files_are_copied_where_the_kernel_cannot_do_it(cli, sharded, tmp_path, monkeypatch):
    def never(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", never)
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0
    assert cli("verify", sharded, tmp_path / "dst", "--no-logits")[0] == 0


def test_a_file_cut_while_it_is_read_is_noticed(sharded, tmp_path):
    plan = make_plan(open_source(sharded))
    os.truncate(shards(sharded)[0], 100_000)
    with pytest.raises(CheckpointError, match="inside tensor"):
        convert(plan, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_an_unfinished_run_of_another_source_is_not_gone_on_with(cli, sharded, tmp_path):
    plan = make_plan(open_source(sharded), group_bytes=300_000)

    def stop(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan, tmp_path / "dst", progress=stop)
    assert (tmp_path / "dst.partial" / JOURNAL).exists()
    os.utime(shards(sharded)[0], ns=(1, 1))
    small = ("--group-size", "300KB")
    refused(cli("convert", sharded, tmp_path / "dst", *small), "has changed since", "--restart")
    code, out, _ = cli("convert", sharded, tmp_path / "dst", *small, "--restart")
    assert code == 0
    assert "made before" not in out


def test_a_torn_line_of_the_journal_is_dropped_and_a_damaged_one_refused(cli, sharded, tmp_path):
    with opened(tmp_path / "dst") as partial:
        partial.begin({"name": "a"})
        partial.record({"group": "0000"})
        with (partial.folder / JOURNAL).open("a") as file:
            file.write('{"group": "00')
    with opened(tmp_path / "dst") as partial:
        partial.begin({"name": "a"})
        assert partial.done == [{"group": "0000"}]
        assert len((partial.folder / JOURNAL).read_text().splitlines()) == 2
        (partial.folder / JOURNAL).write_text('{"name": "a"}\nnonsense\n')
        with pytest.raises(CheckpointError, match=r"damaged.*--restart"):
            partial.begin({"name": "a"})
    refused(cli("convert", sharded, tmp_path / "dst"), "damaged", "--restart")


def test_damage_is_found_by_verify_and_by_export(cli, sharded, tmp_path):
    dst = tmp_path / "dst"
    assert cli("convert", sharded, dst)[0] == 0
    chunk = dst / "weights" / "0000" / "layers.1.mlp.gate_up.weight" / "0.0.0.0"
    with chunk.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    code, _, err = cli("verify", sharded, dst, "--no-logits")
    assert code == 1
    assert "layers.1.mlp.gate_up.weight" in err
    assert "entry 0 of its first axis is not that of tensor" in err
    refused(cli("export", dst, tmp_path / "back"), "layers.1.mlp.gate_up.weight")
    converted = Converted(dst)
    with pytest.raises(CheckpointError, match="not what was written"):
        converted.check(converted.parameters["layers", 1, "mlp", "gate_up", "weight"])
    chunk.unlink()
    refused(cli("export", dst, tmp_path / "back"), "cannot be read")
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.partial").exists()


def test_another_checkpoint_is_distinguished_by_verify(cli, sharded, tmp_path):
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0
    code, _, err = cli("verify", GOLDEN / "llama", tmp_path / "dst", "--no-logits")
    assert code == 1
    assert "was made of another checkpoint than llama" in err
