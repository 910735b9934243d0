"""The reader and writer of safetensors against the `safetensors` library, and what they refuse."""

import contextlib
import json
import random

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from peagle_jax.checkpoint.safetensors import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    read_header,
    write,
)


def some_tensors() -> dict[str, np.ndarray]:
    """One tensor of every dtype, and the shapes that are easy to get wrong."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 2, (2, 3)).astype(dtype) for name, dtype in DTYPES.items()}
    values = rng.normal(0, 4, (5, 7))
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        tensors[f"values {np.dtype(dtype)}"] = values.astype(dtype)
    tensors |= {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    return tensors | {"günther": np.arange(3)}  # odd sizes before it: not aligned in the file


def file_of(header: dict | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "F32", shape: list | None = None) -> dict:
    return dict(
        dtype=dtype,
        shape=[(end - begin) // 4] if shape is None else shape,
        data_offsets=[begin, end],
    )


def test_files_of_the_library_read_the_same(tmp_path):
    tensors = some_tensors()
    (tmp_path / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(tensors)
    for name, array in tensors.items():
        got = checkpoint.read(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
        assert checkpoint.info(name).shape == array.shape


def test_the_library_reads_what_is_written(tmp_path):
    tensors = some_tensors()
    write(tmp_path / "model.safetensors", tensors)
    read = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert DTYPES[read[name]["dtype"]] == array.dtype
        assert tuple(read[name]["shape"]) == array.shape
        assert bytes(read[name]["data"]) == array.tobytes()
    again = Checkpoint(tmp_path)
    assert all(again.read(name).tobytes() == array.tobytes() for name, array in tensors.items())


def test_arrays_that_are_not_contiguous_are_written_in_their_order(tmp_path):
    array = np.arange(12).reshape(3, 4).T
    write(tmp_path / "model.safetensors", {"x": array})
    assert np.array_equal(Checkpoint(tmp_path).read("x"), array)


def test_reading_copies_nothing_and_cannot_change_the_file(tmp_path):
    write(tmp_path / "model.safetensors", {"x": np.arange(4)})
    array = Checkpoint(tmp_path).read("x")
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


eight = bytes(8)
REFUSED = {
    "empty file": (b"", "header length"),
    "half of a length": (b"\x08\x00", "header length"),
    "length past the end": (b"\xff" * 8 + b"{}", "header length"),
    "length of gigabytes": ((10**12).to_bytes(8, "little") + b"{}", "header length"),
    "not text": (file_of(b"\xff\xfe\x00"), "header:"),
    "not json": (file_of(b"{hello"), "header:"),
    "too deep": (file_of(b"[" * 100_000), "header:"),
    "not an object": (file_of(b"[1, 2]"), "not an object"),
    "truncated": (file_of({"x": entry(0, 8)}, bytes(7)), "truncated: tensor 'x'"),
    "bytes after the end": (file_of({"x": entry(0, 8)}, bytes(9)), "1 bytes after the last"),
    "no tensors but bytes": (file_of({}, eight), "8 bytes after the last"),
    "unknown dtype": (file_of({"x": entry(0, 8, "F33")}, eight), "bad header entry"),
    "no dtype": (file_of({"x": {"shape": [2], "data_offsets": [0, 8]}}, eight), "bad header entry"),
    "entry of another kind": (file_of({"x": [0, 8]}, eight), "bad header entry"),
    "one offset": (file_of({"x": entry(0, 8) | {"data_offsets": [8]}}, eight), "bad header entry"),
    "shape of text": (file_of({"x": entry(0, 8, shape=["a"])}, eight), "bad header entry"),
    "numbers as text": (file_of({"x": entry(0, 8, shape=["2"])}, eight), "bad header entry"),
    "numbers with a fraction": (
        file_of({"x": entry(0, 8, shape=[2.0])}, eight),
        "bad header entry",
    ),
    "size against shape": (file_of({"x": entry(0, 8, shape=[3])}, eight), "which disagree"),
    "size against dtype": (file_of({"x": entry(0, 8, "F64", [2])}, eight), "which disagree"),
    "negative shape": (file_of({"x": entry(0, 8, shape=[-2, -1])}, eight), "which disagree"),
    "negative offset": (file_of({"x": entry(-8, 0)}, eight), "which disagree"),
    "end before begin": (file_of({"x": entry(8, 0, shape=[-2])}, eight), "which disagree"),
    "overlap": (file_of({"x": entry(0, 8), "y": entry(4, 12)}, bytes(12)), "'y' begins at"),
    "the same bytes": (file_of({"x": entry(0, 8), "y": entry(0, 8)}, eight), "begins at"),
    "hole": (file_of({"x": entry(0, 4), "y": entry(8, 12)}, bytes(12)), "'y' begins at"),
    "hole at the start": (file_of({"x": entry(4, 8)}, eight), "'x' begins at"),
    "one name twice": (
        file_of(b'{"x": %b, "x": %b}' % ((json.dumps(entry(0, 8)).encode(),) * 2), eight),
        "used twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_files_are_refused_as_the_library_refuses_them(case, tmp_path):
    content, message = REFUSED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    if case != "one name twice":  # the library takes the last one
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


def test_files_with_random_damage_are_refused_or_read_and_nothing_else(tmp_path, num_cases):
    """The library's verdict for each mutation of a header, and never another exception."""
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int64)}
    write(path, tensors)
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    verdicts = []
    count = num_cases("damaged safetensors files", 400)
    for _ in range(count):
        content = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(end)] = rng.choice(b'0123456789{}[]:,"-F I.e\x00\xff')
        if rng.random() < 0.2:
            content = content[: rng.randrange(len(content))]
        path.write_bytes(content)
        try:
            ours = read_header(path).keys()
        except CheckpointError:
            ours = None
        try:
            theirs = dict(safetensors.deserialize(bytes(content))).keys()
        except safetensors.SafetensorError:
            theirs = None
        assert ours == theirs, bytes(content[:end])
        verdicts.append(ours is None)
    assert count / 8 < sum(verdicts) < count, "no damage was harmless, or all was"


numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
)
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from([*DTYPES, "F4", "f32"]), numbers),
            "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
            "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
        }
    ),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), numbers),
    numbers,
)
headers = st.dictionaries(
    st.one_of(st.text(max_size=5), st.just("__metadata__")), entries, max_size=4
)


def test_any_header_is_refused_or_read(num_cases, tmp_path):
    """At times its length is wrong, or bytes are missing at the end."""
    path = tmp_path / "model.safetensors"

    @settings(
        deadline=None, derandomize=True, max_examples=num_cases("damaged safetensors files", 1500)
    )
    @given(
        header=headers, data=st.binary(max_size=80), cut=st.integers(0, 12), grow=st.integers(-9, 9)
    )
    def check(header, data, cut, grow):
        text = json.dumps(header).encode()
        length = max(0, len(text) + (grow if cut == 1 else 0))
        content = length.to_bytes(8, "little") + text + data
        path.write_bytes(content[: len(content) - (cut if cut > 8 else 0)])
        with contextlib.suppress(CheckpointError):
            table = read_header(path)
            checkpoint = Checkpoint(tmp_path)
            assert all(checkpoint.read(name).shape == one.shape for name, one in table.items())

    check()


def shard(folder, name: str, **tensors) -> None:
    write(folder / name, {key: np.full(2, value, np.float32) for key, value in tensors.items()})


def index(folder, weight_map) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_the_index_decides_before_any_other_file(tmp_path):
    shard(tmp_path, "part-1.safetensors", a=1)
    shard(tmp_path, "part-2.safetensors", b=2)
    shard(tmp_path, "model.safetensors", a=7, c=7)
    shard(tmp_path, "consolidated.safetensors", a=8)
    index(tmp_path, {"a": "part-1.safetensors", "b": "part-2.safetensors"})
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b"]
    assert checkpoint.read("a").tolist() == [1, 1]


def test_without_an_index_model_safetensors_is_the_checkpoint(tmp_path):
    shard(tmp_path, "model.safetensors", a=7)
    shard(tmp_path, "consolidated.safetensors", a=8)
    assert Checkpoint(tmp_path).read("a").tolist() == [7, 7]


def test_a_single_file_may_have_any_name(tmp_path):
    shard(tmp_path, "head.safetensors", a=3)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("a").tolist() == [3, 3]
    assert "a" in checkpoint
    assert "b" not in checkpoint
    with pytest.raises(CheckpointError, match="'b' is missing"):
        checkpoint.read("b")


def test_shards_may_be_links_into_a_cache(tmp_path):
    shard(tmp_path, "blob", a=4)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "part.safetensors").symlink_to(tmp_path / "blob")
    index(folder, {"a": "part.safetensors"})
    assert Checkpoint(folder).read("a").tolist() == [4, 4]


def two_files(folder) -> None:
    shard(folder, "a.safetensors", a=1)
    shard(folder, "b.safetensors", b=1)


def same_tensor_twice(folder) -> None:
    shard(folder, "1.safetensors", a=1)
    shard(folder, "2.safetensors", a=1, b=1)
    index(folder, {"a": "1.safetensors", "b": "2.safetensors"})


def unlisted(folder) -> None:
    shard(folder, "1.safetensors", a=1, b=1)
    index(folder, {"a": "1.safetensors"})


def exchanged(folder) -> None:
    two_files(folder)
    index(folder, {"a": "b.safetensors", "b": "a.safetensors"})


def promised(folder) -> None:
    two_files(folder)
    index(folder, {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"})


def cut_shard(folder) -> None:
    two_files(folder)
    index(folder, {"a": "a.safetensors", "b": "b.safetensors"})
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:-1])


def outside(folder) -> None:
    shard(folder.parent, "secret.safetensors", a=1)
    index(folder, {"a": "../secret.safetensors"})


def absolute(folder) -> None:
    shard(folder, "a.safetensors", a=1)
    index(folder, {"a": str(folder / "a.safetensors")})


FOLDERS = {
    "no file": (lambda folder: None, "holds no"),
    "two files without an index": (two_files, "holds 2"),
    "missing shard": (lambda f: index(f, {"a": "gone.safetensors"}), "gone.safetensors, which is"),
    "tensor in two shards": (same_tensor_twice, "'a' is also in 1.safetensors"),
    "tensor the index does not list": (unlisted, "does not list tensor 'b' of 1.safetensors"),
    "tensors in each other's shard": (exchanged, "says b.safetensors holds tensor 'a'; it is in a"),
    "tensor that no shard holds": (promised, "says b.safetensors holds tensor 'c'; it does not"),
    "truncated shard": (cut_shard, "b.safetensors: truncated: tensor 'b'"),
    "index of nothing": (lambda f: index(f, {}), "not a weight index"),
    "index nested without end": (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 99_999),
        "not a weight index",
    ),
    "shard in a folder below": (
        lambda f: index(f, {"a": "x/a.safetensors"}),
        "not a file beside it",
    ),
    "shard without a name": (lambda f: index(f, {"a": ".."}), "which is missing"),
    "shard outside of the folder": (outside, "not a file beside it"),
    "shard by absolute path": (absolute, "not a file beside it"),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "not a weight index",
    ),
    "index that is a list": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        "not a weight index",
    ),
    "index that is no json": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "not a weight index",
    ),
    "map to numbers": (lambda f: index(f, {"a": 1}), "not a weight index"),
    "map to nothing and to text": (lambda f: index(f, {"a": None, "b": "x"}), "not a weight index"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_say_not_what_to_read_are_refused(case, tmp_path):
    make, message = FOLDERS[case]
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "typo")
