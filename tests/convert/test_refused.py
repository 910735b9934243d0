"""Every bad input is one line on stderr and exit code 2, and no output folder exists."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from convert.output import new_folder
from convert.plan import make_plan
from convert.source import open_source
from convert.writer import convert
from peagle_jax.checkpoint import CheckpointError
from peagle_jax.cli.model_folders import embedded
from tests.convert.conftest import GOLDEN
from tests.golden.folders import parts, written


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


def truncate(folder: Path) -> None:
    os.truncate(shards(folder)[1], shards(folder)[1].stat().st_size - 1)


def missing_shard(folder: Path) -> None:
    shards(folder)[2].unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def pickled(folder: Path) -> None:
    for one in folder.glob("*.safetensors*"):
        one.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def unsupported_model(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "mamba"}))


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (truncate, ["truncated", "model-00002-of-00003.safetensors"]),
        (missing_shard, ["model-00003-of-00003.safetensors", "missing"]),
        (no_config, ["no config.json"]),
        (pickled, ["holds *.bin", "save_pretrained"]),
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
    raw, held = parts("llama")
    held["model.layers.0.surprise"] = held.pop("model.norm.weight")
    written(tmp_path / "src", raw, held)
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
        (["convert", "SRC", "DST", "--max-in-flight", "1MB"], ["is removed: memory follows"]),
        (["convert", "SRC", "DST", "--group-size", "1GB"], ["is removed: a conversion takes"]),
        (["convert", "SRC", "DST", "--restart"], ["--restart is removed", "begins anew"]),
        (["verify", "SRC", "DST", "--no-logits"], ["--no-logits is removed: every bit"]),
        (["inspect", "SRC"], ["inspect is removed: `plan` has a line"]),
        (["synthetic", "gpt-oss-20b", "DST"], ["synthetic is removed"]),
        (["dequantize", "SRC", "DST"], ["dequantize is removed: transformers"]),
        (["plan", "HEAD"], ["draft head", "--target DIR"]),
        (["plan", "HEAD", "--target", "EMBEDDED"], ["the head does not fit the target"]),
        (["verify", "SRC", "SRC"], ["no converted folder", "peagle-convert convert"]),
        (["export", "SRC", "DST"], ["no converted folder"]),
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
    with new_folder(tmp_path / "dst", 0, []):
        refused(cli("convert", sharded, tmp_path / "dst"), "another run is writing it")
    (tmp_path / "dst").rmdir()
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0


def test_what_a_killed_run_left_is_written_anew(cli, sharded, tmp_path):
    left = tmp_path / "dst.partial" / "weights" / "0000"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0
    assert not (tmp_path / "dst" / "weights" / "0000" / "half").exists()
    assert not (tmp_path / "dst.partial").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(cli, sharded, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("convert.writer.copy_side_files", full)
    refused(cli("convert", sharded, tmp_path / "dst"), "No space left on device")
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.partial").exists()


def test_too_little_room_is_said_before_writing(cli, sharded, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(cli("convert", sharded, tmp_path / "dst"), "GB are needed and 0.0 GB are free")
    assert not (tmp_path / "dst").exists()


def test_a_file_cut_while_it_is_read_is_noticed(sharded, tmp_path):
    plan = make_plan(open_source(sharded))
    os.truncate(shards(sharded)[0], 100_000)
    with pytest.raises(CheckpointError, match="inside tensor"):
        convert(plan, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_damage_is_found_by_verify_and_by_export(cli, sharded, tmp_path):
    dst = tmp_path / "dst"
    assert cli("convert", sharded, dst)[0] == 0
    chunk = dst / "weights" / "0000" / "layers.1.mlp.gate_up.weight" / "0.0.0.0"
    with chunk.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    code, _, err = cli("verify", sharded, dst)
    assert code == 1
    assert "layers.1.mlp.gate_up.weight" in err
    assert "entry 0 of its first axis is not that of tensor" in err
    refused(cli("export", dst, tmp_path / "back"), "layers.1.mlp.gate_up.weight")
    chunk.unlink()
    refused(cli("export", dst, tmp_path / "back"), "cannot be read")
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.partial").exists()


def test_another_checkpoint_is_distinguished_by_verify(cli, sharded, tmp_path):
    assert cli("convert", sharded, tmp_path / "dst")[0] == 0
    code, _, err = cli("verify", GOLDEN / "llama", tmp_path / "dst")
    assert code == 1
    assert "was made of another checkpoint than llama" in err
