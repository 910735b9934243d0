"""Damage to small checkpoints and to converted folders; everything follows from a random generator.

`damaged(folder, rng)` changes a `Folder` in one to three places, then perhaps its files, and says
where.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.config_keys import KEYS, ROPE_KEYS, UNSUPPORTED
from peagle_jax.checkpoint.safetensors import DTYPES, INDEX
from tests.convert.seeds import Folder, as_json

WILD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    64,
    100,
    256,
    10**12,
    2**31,
    10**400,
    0.5,
    1.0,
    -0.5,
    1e-300,
    1e39,
    float("nan"),
    float("inf"),
    "",
    "x",
    "silu",
    "64",
    "llama",
    "llama3",
    "yarn",
    "default",
    [],
    [1],
    [[]],
    [None],
    {},
    {"rope_type": "yarn"},
    {"0": {}},
    ["sliding_attention"],
    ["full_attention"] * 2,
]
_MORE_KEYS = sorted({*ROPE_KEYS, *UNSUPPORTED, *(key for table in KEYS.values() for key in table)})
_ROPE_MORE = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "mscale",
    "partial_rotary_factor",
]


def _place(raw: dict, rng: Random) -> dict:
    """An object of a config, at any depth."""
    while True:
        inner = [value for value in raw.values() if isinstance(value, dict) and value]
        if not inner or rng.random() < 0.5:
            return raw
        raw = rng.choice(inner)


def _value(old, rng: Random):
    """Another value: anything, or one near to the old one."""
    near: list = []
    if isinstance(old, bool):
        near = [not old, int(old)]
    elif isinstance(old, int | float) and abs(old) < 1e300:
        near = [old + 1, old * 2, -old, str(old), [old], float(old), old // 2]
    elif isinstance(old, list):
        near = [old[:-1], old * 2, old[::-1]]
    return deepcopy(rng.choice(near) if near and rng.random() < 0.6 else rng.choice(WILD))


def _config_of(folder: Folder, rng: Random) -> tuple[str, dict]:
    choices = {"config.json": folder.config, "generation_config.json": folder.generation}
    if folder.target is not None and rng.random() < 0.3:
        return "target/config.json", folder.target
    name = "generation_config.json" if rng.random() < 0.1 else "config.json"
    return (name, choices[name]) if choices[name] else ("config.json", folder.config)


def change_key(folder: Folder, rng: Random) -> str:
    file, config = _config_of(folder, rng)
    raw = _place(config, rng)
    key = rng.choice(sorted(raw)) if raw else "x"
    raw[key] = _value(raw.get(key), rng)
    return f"{file}: {key} = {raw[key]!r}"[:200]


def add_key(folder: Folder, rng: Random) -> str:
    file, config = _config_of(folder, rng)
    raw = _place(config, rng)
    key = rng.choice([*_MORE_KEYS, *_ROPE_MORE, "zebra"])
    raw[key] = deepcopy(rng.choice(WILD))
    return f"{file}: {key} = {raw[key]!r}"[:200]


def drop_key(folder: Folder, rng: Random) -> str:
    file, config = _config_of(folder, rng)
    raw = _place(config, rng)
    key = rng.choice(sorted(raw)) if raw else "x"
    raw.pop(key, None)
    return f"{file}: without {key}"


def _pick(folder: Folder, rng: Random) -> str:
    return rng.choice(sorted(folder.tensors))


def relabel(folder: Folder, rng: Random) -> str:
    """Another dtype for the same bytes, and mostly a shape that fits."""
    name = _pick(folder, rng)
    one = folder.tensors[name]
    old = DTYPES[one.dtype].itemsize
    one.dtype = rng.choice(sorted(DTYPES))
    new = DTYPES[one.dtype].itemsize
    if old != new and one.shape and (one.shape[-1] * old) % new == 0 and rng.random() < 0.7:
        one.shape = [*one.shape[:-1], one.shape[-1] * old // new]
    return f"{name}: relabelled {one.dtype} {one.shape}"


_FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}


def cast(folder: Folder, rng: Random) -> str:
    """The same numbers in another float dtype: one tensor, or all that end alike."""
    name = _pick(folder, rng)
    chosen, every = rng.choice(sorted(_FLOATS)), rng.random() < 0.5
    end = name.split(".", 3)[-1]
    for other, one in folder.tensors.items():
        if (other == name or (every and other.endswith(end))) and one.dtype in _FLOATS:
            array = np.frombuffer(one.data, DTYPES[one.dtype]).astype(np.float64)
            with np.errstate(over="ignore"):
                one.data = array.astype(_FLOATS[chosen]).tobytes()
            one.dtype = chosen
    return f"{name}{' and its like' if every else ''}: cast to {chosen}"


def reshape(folder: Folder, rng: Random) -> str:
    name = _pick(folder, rng)
    one = folder.tensors[name]
    shapes = [one.shape[::-1], [1, *one.shape], [len(one.data)], [], [0], [*one.shape, 1]]
    one.shape = rng.choice(shapes)
    if rng.random() < 0.4:
        one.data = one.data[: int(np.prod(one.shape)) * DTYPES[one.dtype].itemsize]
    return f"{name}: shape {one.shape}, {len(one.data)} bytes"


def resize(folder: Folder, rng: Random) -> str:
    """One row or column more or fewer, with bytes that fit."""
    name = _pick(folder, rng)
    one = folder.tensors[name]
    if one.shape:
        axis = rng.randrange(len(one.shape))
        one.shape = [*one.shape]
        one.shape[axis] = max(0, one.shape[axis] + rng.choice([-1, 1]))
        size = int(np.prod(one.shape)) * DTYPES[one.dtype].itemsize
        one.data = (one.data + bytes(size))[:size]
    return f"{name}: resized to {one.shape}"


def lose(folder: Folder, rng: Random) -> str:
    name = _pick(folder, rng)
    if len(folder.tensors) > 1:
        del folder.tensors[name]
    return f"without {name}"


_ENDS = ["_scale", "_scale_inv", ".bias", "_blocks", ".rotary_emb.inv_freq", ".input_scale", ""]


def rename(folder: Folder, rng: Random) -> str:
    name = _pick(folder, rng)
    new = rng.choice(
        [
            name.replace("weight", "bias"),
            name + rng.choice(_ENDS),
            "model." + name,
            _pick(folder, rng),
            name.replace("layers.0", "midlayer"),
            name.replace("layers.0", "layers.1"),
            "",
            "é\n\x00",
        ]
    )
    one = folder.tensors.pop(name)
    folder.tensors[new] = one
    return f"{name}: renamed {new!r}"


def double(folder: Folder, rng: Random) -> str:
    name = _pick(folder, rng)
    new = rng.choice([name + rng.choice(_ENDS), "lm_head.weight", "d2t", "t2d", "mask_hidden", "x"])
    folder.tensors[new] = replace(folder.tensors[name])
    return f"{name}: also as {new!r}"


def poison(folder: Folder, rng: Random) -> str:
    """NaN, infinity, zero, negative or extreme numbers in a tensor; or other whole numbers."""
    name = _pick(folder, rng)
    scales = [one for one in sorted(folder.tensors) if "scale" in one or one in ("d2t", "t2d")]
    if scales and rng.random() < 0.5:
        name = rng.choice(scales)
    one = folder.tensors[name]
    array = np.frombuffer(one.data, np.uint8).copy()
    if not array.size:
        return f"{name}: empty"
    size = DTYPES[one.dtype].itemsize
    what = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"])
    begin = rng.randrange(len(array) // size) * size
    count = rng.choice([1, 3, len(array)])
    array[begin : begin + count * size] = what[0]
    one.data = array.tobytes()
    return f"{name}: bytes {what!r} from {begin}, {count} numbers"


def shard(folder: Folder, rng: Random) -> str:
    folder.num_shards = rng.choice([2, 3])
    return f"{folder.num_shards} shards"


def break_header(folder: Folder, rng: Random) -> str:
    name = _pick(folder, rng)
    wild = deepcopy(rng.choice(WILD))
    how = rng.choice(["dtype", "shape", "data_offsets", "entry", "metadata", "end", "begin"])

    def change(header: dict) -> None:
        if how == "metadata":
            header["__metadata__"] = wild
        elif name not in header:
            return
        elif how == "entry":
            header[name] = wild
        elif how in ("begin", "end"):
            header[name]["data_offsets"][how == "end"] += rng.choice([-1, 1, 8, 10**18])
        else:
            header[name][how] = wild

    folder.header_changes.append(change)
    return f"header of {name}: {how} {wild!r}"[:200]


STRUCTURE = [
    *[change_key] * 6,
    *[add_key] * 3,
    *[drop_key] * 2,
    relabel,
    cast,
    cast,
    reshape,
    resize,
    lose,
    rename,
    double,
    double,
    poison,
    poison,
    poison,
    shard,
    break_header,
    break_header,
]


def _break_file(files: dict[str, bytes], rng: Random) -> str:
    """Truncates, extends, empties, flips or removes a file, or changes its text."""
    name = rng.choice(sorted(files))
    data = files[name]
    at = rng.randrange(len(data) + 1)
    if name.endswith(".safetensors") and rng.random() < 0.7:
        at = min(at, rng.choice([4, 8, 9, 40, 200]))
    how = rng.choice(
        ["cut", "more", "empty", "flip", "flip", "remove", "utf16", "deep", "twice", "bom"]
    )
    changed = {
        "cut": data[:at],
        "more": data + b"\x00",
        "empty": b"",
        "flip": data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        if at < len(data)
        else data[:-1],
        "utf16": data.decode("latin-1").encode("utf-16"),
        "deep": b"[" * 100_000,
        "twice": data[:-1] + b', "rope_theta": 7, "rope_theta": 7}',
        "bom": b"\xef\xbb\xbf" + data,
    }
    if how == "remove":
        del files[name]
    else:
        files[name] = changed[how]
    return f"{name}: {how} at {at}"


def _break_index(files: dict[str, bytes], rng: Random) -> str:
    raw = json.loads(files[INDEX])
    tensors = raw["weight_map"]
    name = rng.choice(sorted(tensors))
    wild = deepcopy(
        rng.choice([*WILD, "../x.safetensors", "model.safetensors", "/etc/passwd", "."])
    )
    how = rng.choice(["map", "file", "lose", "extra", "whole"])
    if how == "map":
        raw["weight_map"] = wild
    elif how == "file":
        tensors[name] = wild
    elif how == "lose":
        del tensors[name]
    elif how == "extra":
        tensors["extra"] = tensors[name]
    else:
        raw = wild
    files[INDEX] = as_json(raw)
    return f"index: {how} {name} {wild!r}"[:200]


def damaged(folder: Folder, rng: Random) -> tuple[dict[str, bytes], list[str]]:
    """(files, what was done)."""
    folder, done = folder.copy(), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        done.append(rng.choice(STRUCTURE)(folder, rng))
    files = folder.files()
    if INDEX in files and rng.random() < 0.6:
        done.append(_break_index(files, rng))
    if rng.random() < 0.12:
        done.append(_break_file(files, rng))
    return files, done


def break_json(raw, rng: Random) -> str:
    """Changes, drops or adds a value anywhere in a JSON object or list."""
    while True:
        places = list(raw) if isinstance(raw, dict) else list(range(len(raw)))
        place = rng.choice(places)
        if not (isinstance(raw[place], dict | list) and raw[place] and rng.random() < 0.8):
            break
        raw = raw[place]
    if rng.random() < 0.3:
        del raw[place]
        return f"without {place!r}"
    raw[place] = _value(raw[place], rng)
    return f"{place!r} = {raw[place]!r}"[:200]


def break_converted(folder: Path, rng: Random) -> str:
    """Damages one file of a converted folder, the manifest most often."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    name = rng.choice(files)
    if "manifest.json" in files and rng.random() < 0.6:
        name = "manifest.json"
    path = folder / name
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raw = None
    if raw and isinstance(raw, dict | list) and rng.random() < 0.8:
        done = break_json(raw, rng)
        path.write_bytes(as_json(raw))
        return f"{name}: {done}"
    contents = {name: path.read_bytes()}
    done = _break_file(contents, rng)
    if name in contents:
        path.write_bytes(contents[name])
    else:
        path.unlink()
    return done
