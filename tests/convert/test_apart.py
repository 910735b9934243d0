"""Nothing is written into, or around, a folder that is read."""

import os
import shutil
from pathlib import Path

import pytest

from tests.convert.conftest import GOLDEN


@pytest.fixture
def source(tmp_path) -> Path:
    """A checkpoint at a/src, a symlink to it at a/link, and another folder b that links into it."""
    shutil.copytree(GOLDEN / "gpt_oss-bf16", tmp_path / "a" / "src")
    (tmp_path / "a" / "link").symlink_to("src")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "into").symlink_to("../a/src/sub")
    return tmp_path / "a" / "src"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


INSIDE = [
    "a/src",
    "a/src/sub",
    "a/src/new/sub",
    "a/link/sub",
    "a/src/../src/sub",
    "b/into",
    "b/into/x",
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("out", INSIDE)
@pytest.mark.parametrize("read", ["a/src", "a/link", "b/../a/src"])
def test_convert_writes_nothing_inside_its_source(read, out, cli, source, tmp_path):
    before = files(source)
    code, _, err = cli("convert", tmp_path / read, tmp_path / out)
    assert (code, err.count("\n")) == (2, 1)
    assert "written inside" in err
    assert files(source) == before
    assert not (source / "sub").exists()


def test_relative_paths_are_understood(cli, source, monkeypatch):
    monkeypatch.chdir(source)
    assert "written inside" in cli("convert", ".", "sub")[2]
    assert cli("convert", ".", "../out")[0] == 0
    assert cli("verify", ".", "../out")[0] == 0


def test_the_unfinished_folder_is_not_the_source(cli, source, tmp_path):
    """OUT's unfinished folder is OUT.partial: a source of that name would be emptied."""
    named = source.rename(source.with_name("out.partial"))
    before = files(named)
    code, _, err = cli("convert", named, named.with_name("out"))
    assert (code, err.count("\n")) == (2, 1)
    assert "which is read" in err
    assert files(named) == before
    below = named.with_name("deep.partial") / "src"
    below.parent.mkdir()
    named.rename(below)
    code, _, err = cli("convert", below, below.parent.with_name("deep"))
    assert code == 2
    assert "written around" in err
    assert files(below) == before


def test_nothing_is_written_into_a_heads_target(cli, tmp_path):
    target = tmp_path / "head.partial"
    shutil.copytree(GOLDEN / "llama", target)
    before = files(target)
    for out in (target / "sub", tmp_path / "head"):
        argv = ("convert", GOLDEN / "peagle-1", out, "--target", target)
        code, _, err = cli(*argv)
        assert (code, err.count("\n")) == (2, 1)
        assert "which is read" in err
    assert files(target) == before


def test_export_writes_nothing_inside_what_it_reads(cli, source, tmp_path):
    made = tmp_path / "made.partial"
    assert cli("convert", source, made)[0] == 0
    before = files(made)
    for out in (made, made / "back", tmp_path / "made"):
        code, _, err = cli("export", made, out)
        assert (code, err.count("\n")) == (2, 1)
        assert "which is read" in err
    assert files(made) == before
    os.symlink(made, tmp_path / "link")
    assert cli("export", tmp_path / "link", tmp_path / "link" / "back")[0] == 2
    assert cli("export", made, tmp_path / "back")[0] == 0
