"""A manifest that convert cannot have written is refused whole, before any of it is used."""

import json
import shutil

import pytest

from convert.export import export
from peagle_jax.checkpoint import CheckpointError, load_target
from peagle_jax.checkpoint.converted import Converted
from tests.convert.conftest import GOLDEN


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from convert.plan import make_plan
    from convert.source import open_source
    from convert.writer import convert

    folder = tmp_path_factory.mktemp("manifest") / "made"
    convert(make_plan(open_source(GOLDEN / "llama-fp8-tensor")), folder)
    return folder


def first(raw: dict) -> dict:
    return raw["parameters"][0]


def tensor(raw: dict) -> dict:
    return next(iter(raw["tensors"].values()))


def file(raw: dict) -> dict:
    return raw["source"]["files"][0]


BROKEN = [
    (lambda raw: raw.pop("source"), "states no source"),
    (lambda raw: file(raw).update(name="../x.safetensors"), "name '../x.safet"),
    (lambda raw: file(raw).update(name="/tmp/x.safetensors"), "name '/tmp/x"),
    (lambda raw: raw["source"]["files"].append(file(raw)), "is listed twice"),
    (lambda raw: file(raw).update(size=-1), "size must be a whole number"),
    (lambda raw: file(raw).update(header_sha256="x"), "header_sha256 'x'"),
    (lambda raw: raw["source"].update(files=[1]), "must be a list of objects"),
    (lambda raw: tensor(raw).update(file="y.safetensors"), "which is not listed"),
    (lambda raw: tensor(raw).update(end=10**9), "end must be a whole number"),
    (lambda raw: tensor(raw).update(shape=[7]), "which disagree"),
    (lambda raw: tensor(raw).pop("sha256"), "states no sha256"),
    (lambda raw: raw["tensors"].update(x=tensor(raw)), "'x' is held by no para"),
    (lambda raw: first(raw).update(group="../0000"), "group '../0000'"),
    (lambda raw: first(raw).update(path=["..", "x"]), "not a module path"),
    (lambda raw: first(raw).update(path=[]), "a path is empty"),
    (
        lambda raw: raw["parameters"][1].update(path=first(raw)["path"]),
        "two parameters have one path",
    ),
    (lambda raw: first(raw).update(dtype="F2"), "dtype 'F2' is unknown"),
    (lambda raw: first(raw).update(shape=["a"]), "is not a shape"),
    (lambda raw: first(raw).update(names=[[]]), "are not names of tensors"),
    (lambda raw: first(raw).update(names=["x"]), "'x', which is not listed"),
    (lambda raw: raw["parameters"][1].update(names=first(raw)["names"]), "held by two parameters"),
    (lambda raw: raw["not_finite"].update(x={"nan": 1, "inf": 0}), "tensor 'x'"),
]


def test_a_manifest_that_describes_other_arrays_than_its_tensors_make_is_refused(
    made, tmp_path, cli
):
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    raw = json.loads((folder / "manifest.json").read_text())
    entry = next(one for one in raw["parameters"] if one["path"][-1] == "bias")
    entry.update(dtype="F16")
    (folder / "manifest.json").write_text(json.dumps(raw))
    name = ".".join(map(str, entry["path"]))
    code, _, err = cli("verify", GOLDEN / "llama-fp8-tensor", folder)
    assert code == 1
    assert f"{name} in weights/0000 differs from the source: the manifest describes" in err
    assert f"{name} was made by other rules" in cli("export", folder, tmp_path / "back")[2]
    with pytest.raises(CheckpointError, match=f"{name} is missing or was converted in another"):
        load_target(folder, dtype="float32")


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_manifest_that_makes_no_sense_is_refused(change, message, made, tmp_path, cli):
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    raw = json.loads((folder / "manifest.json").read_text())
    change(raw)
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message) as caught:
        Converted(folder)
    assert str(folder / "manifest.json") in str(caught.value)
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "back")
    with pytest.raises(CheckpointError, match=message):
        load_target(folder, dtype="float32")
    code, _, err = cli("export", folder, tmp_path / "back")
    assert (code, err.count("\n")) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_a_chunk_larger_than_its_array_is_refused(made, tmp_path, cli):
    """Reading it would end the process."""
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    path = folder / "weights" / "0000" / "norm.weight" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chunks": [10**12]}))
    for argv in (
        ("verify", GOLDEN / "llama-fp8-tensor", folder),
        ("export", folder, tmp_path / "back"),
    ):
        code, _, err = cli(*argv)
        assert (code, err.count("\n")) in ((1, 1), (2, 1))
        assert "norm.weight" in err
        assert "larger than the array" in err
    with pytest.raises(CheckpointError, match="larger than the array"):
        load_target(folder, dtype="float32")
