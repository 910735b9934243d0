"""Fused parameters of random dtypes: refused alike by plan, convert and load, or loaded as numpy
decodes them.

The decoding below is the test's own: nothing of the project reads the tensors or says where they
belong.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from bench.presets import with_layers
from pallas_kernels import formats
from peagle_jax.checkpoint import CheckpointError, load_head, load_target, target_config
from peagle_jax.checkpoint.head_json import head_json
from peagle_jax.checkpoint.safetensors import write
from peagle_jax.checkpoint.tables import head_tensors, target_tensors
from peagle_jax.checkpoint.target_writer import target_json
from tests import tiny

F32, F16, BF16, FP8 = map(
    np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
)
HEADS = {
    "head peagle": dict(method="peagle", num_layers=2),
    "head eagle3": dict(method="eagle3", num_layers=1, mask_token_id=None),
}
QUANTIZABLE = re.compile(r".*(qkv|o_proj|gate_up|down_proj)\.weight")
"""By the name of its group, a parameter whose tensors may be FP8."""
SIZES = (
    dict(hidden_size=160, head_dim=40, intermediate_size=96),  # edges cut blocks of 128
    dict(hidden_size=256, head_dim=64, intermediate_size=128),  # whole blocks
)


@dataclass(frozen=True)
class Case:
    """A checkpoint's tensors, and what each weight stands for, by its name without ".weight"."""

    folder: Path
    options: list[str]
    dense: dict[str, np.ndarray]
    is_head: bool


def config_of(family: str, size: dict):
    if family in HEADS:
        vocabulary = dict(vocab_size=24, draft_vocab_size=24)
        widths = size | {"target_hidden_size": size["hidden_size"]}
        return replace(tiny.HEAD, **(HEADS[family] | vocabulary | widths))
    changes = dict(tiny.TARGETS.get(family, {}))
    if experts := changes.get("experts"):
        kept = tuple(i for i in experts.dense_layers if i < 2)
        changes["experts"] = replace(experts, num_experts=3, dense_layers=kept)
    config = replace(tiny.TARGET, vocab_size=24, **(changes | size))
    return with_layers(config, 2)


def make_case(rng: np.random.Generator, family: str, tmp_path: Path) -> Case:
    config = config_of(family, SIZES[rng.integers(2)])
    is_head = family in HEADS
    shapes = {
        n: i.shape for n, i in (head_tensors if is_head else target_tensors)(config, BF16).items()
    }
    tensors, dense, forms = {}, {}, {}
    packed = family == "gpt_oss" and rng.random() < 0.6
    for name, shape in shapes.items():
        if packed and re.search(r"experts\.(gate_up|down)_proj$", name):
            add_mxfp4(rng, name, shape, tensors, dense)
            continue
        group = group_of(name)
        if group not in forms:
            forms[group] = draw_form(rng, QUANTIZABLE.fullmatch(group) is not None)
        add(rng, name, shape, draw_member(rng, forms[group]), tensors, dense)
    order = rng.permutation([*tensors])
    folder = tmp_path / "src"
    folder.mkdir()
    write(folder / "model.safetensors", {name: tensors[name] for name in order})
    raw = head_json(config, 512, "bfloat16") if is_head else target_json(config, "bfloat16")
    (folder / "config.json").write_text(json.dumps(raw))
    options = []
    if is_head:
        target = replace(tiny.TARGET, vocab_size=24, hidden_size=config.hidden_size)
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "config.json").write_text(
            json.dumps(target_json(target, "bfloat16"))
        )
        options = ["--target", str(tmp_path / "target")]
    return Case(folder, options, dense, is_head)


def group_of(name: str) -> str:
    """One name for all tensors of a fused parameter."""
    name = re.sub(r"\b[qkv]_proj\b", "qkv", re.sub(r"\bexperts\.\d+", "experts", name))
    return re.sub(r"\b(gate|up)_proj\b", "gate_up", name)


def draw_form(rng: np.random.Generator, may_be_fp8: bool) -> tuple:
    """(number formats, forms of scales, dtypes of scales) of the members of one parameter."""
    odd = rng.random() < 0.06
    floats = [F32, F16, BF16]
    scale_forms = ["tensor", "one", "row", "column", "block", "row and block"]
    if may_be_fp8 and rng.random() < 0.5:
        formats_ = [FP8, BF16] if odd and rng.random() < 0.5 else [FP8]
        forms = scale_forms if rng.random() < 0.3 else [scale_forms[rng.integers(len(scale_forms))]]
        scales = floats if odd else [floats[rng.integers(3)]]
        return formats_, forms, scales
    return (floats if odd else [floats[rng.integers(3)]]), [None], [None]


def draw_member(rng: np.random.Generator, form: tuple) -> tuple:
    return tuple(choices[rng.integers(len(choices))] for choices in form)


def add(rng, name, shape, member, tensors, dense) -> None:
    """A tensor and its scale, and what they stand for, by definition."""
    dtype, form, scale_dtype = member
    values = rng.normal(size=shape).astype(np.float32).astype(dtype)
    tensors[name] = values
    if dtype != FP8:
        dense[name] = values.astype(np.float32)
        return
    n, k = shape
    down, across = -(-n // 128), -(-k // 128)
    scale_shape = {
        "tensor": (),
        "one": (1,),
        "row": (n, 1),
        "column": (n,),
        "block": (down, across),
        "row and block": (n, across),
    }[form]
    scale = rng.uniform(0.01, 2, scale_shape).astype(np.float32).astype(scale_dtype)
    tensors[name + rng.choice(["_scale", "_scale_inv"])] = np.asarray(scale)
    each = np.empty(shape, np.float32)
    for r in range(n):
        for c in range(0, k, 128):
            index = {
                "tensor": (),
                "one": (0,),
                "row": (r, 0),
                "column": (r,),
                "block": (r // 128, c // 128),
                "row and block": (r, c // 128),
            }
            each[r, c : c + 128] = np.float32(scale[index[form]])
    dense[name] = values.astype(np.float32) * each


def add_mxfp4(rng, name, shape, tensors, dense) -> None:
    """[E, K, N] of transformers, as blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    E, K, N = shape
    blocks = rng.integers(0, 256, (E, N, K // 32, 16), np.uint8)
    scales = rng.integers(120, 130, (E, N, K // 32), np.uint8)
    tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    out = np.empty((E, N, K // 32, 32), np.float32)
    out[..., 0::2], out[..., 1::2] = table[blocks & 15], table[blocks >> 4]
    out *= (2.0 ** (scales.astype(np.float32) - 127))[..., None]
    dense[name] = out.reshape(E, N, K).transpose(0, 2, 1)


def fused(case: Case, path: tuple) -> np.ndarray | None:
    """What a fused parameter must equal: its tensors' numbers, put together."""
    block, module, leaf = ".".join(map(str, path[:-3])), path[-2], path[-1]
    if block.startswith("layers") and case.is_head:
        block = f"layers.{int(path[1]) + 1}"
    base = {"first": "midlayer"}.get(block, block)
    base = base if case.is_head else f"model.{base}"
    get = lambda name: case.dense.get(f"{base}.{name}")
    if module == "qkv":
        parts = [get(f"self_attn.{p}_proj.{leaf}") for p in "qkv"]
        return np.concatenate([part for part in parts if part is not None])
    if module == "out":
        return get(f"self_attn.o_proj.{leaf}")
    if module not in ("gate_up", "down"):
        return None
    if (whole := get(f"mlp.experts.{module}_proj{'_bias' if leaf == 'bias' else ''}")) is not None:
        if leaf == "bias":
            return whole if module == "down" else np.stack([whole[:, 0::2], whole[:, 1::2]], 1)
        rows = whole.transpose(0, 2, 1)
        return rows if module == "down" else np.stack([rows[:, 0::2], rows[:, 1::2]], 1)
    names = ("gate", "up") if module == "gate_up" else ("down",)
    if (get("mlp.experts.0.down_proj.weight")) is not None:
        experts = []
        while get(f"mlp.experts.{len(experts)}.down_proj.weight") is not None:
            one = [get(f"mlp.experts.{len(experts)}.{n}_proj.weight") for n in names]
            experts.append(np.stack(one) if len(one) > 1 else one[0])
        return np.stack(experts)
    return np.concatenate([get(f"mlp.{n}_proj.{leaf}") for n in names])


def load(case: Case, folder: Path) -> nnx.Module:
    if case.is_head:
        return load_head(folder, target_config(Path(case.options[1])), dtype="float32")
    return load_target(folder, dtype="float32")


def check_values(case: Case, model: nnx.Module) -> int:
    leaves = {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(model))}
    compared = 0
    for path, values in leaves.items():
        want = None if len(path) < 4 or path[-1] == "scale" else fused(case, path)
        if want is None:
            continue
        scale = leaves.get((*path[:-1], "scale")) if path[-1] == "weight" else None
        got = values if scale is None else formats.dequantize(values, scale, np.float32)
        np.testing.assert_array_equal(np.asarray(jax.device_get(got)), want, err_msg=str(path))
        compared += 1
    return compared


def same_weights(first: nnx.Module, second: nnx.Module) -> bool:
    pairs = [jax.tree.leaves_with_path(nnx.state(model)) for model in (first, second)]
    paths = [[path for path, _ in leaves] for leaves in pairs]
    return paths[0] == paths[1] and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for (_, a), (_, b) in zip(*pairs, strict=True)
    )


REASONS = ("the two are one parameter here", "both must be quantised or neither", "different forms")
FAMILIES = (*dict.fromkeys((*tiny.TARGETS, tiny.TARGET.family)), *HEADS)


@pytest.mark.sampled(1, slow=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixes_are_refused_alike_or_loaded_as_they_decode(family, cli, tmp_path, num_cases):
    verdicts = []
    for seed in range(num_cases("mixes of dtypes in fused parameters", 2)):
        where = tmp_path / str(seed)
        where.mkdir()
        rng = np.random.default_rng([seed, FAMILIES.index(family)])
        case = make_case(rng, family, where)
        results = [
            cli("plan", case.folder, *case.options),
            cli("convert", case.folder, where / "dst", *case.options),
        ]
        if any(code for code, _, _ in results):
            lines = {err for _, _, err in results}
            assert {code for code, _, _ in results} == {2}, (seed, results)
            assert len(lines) == 1, (seed, lines)
            assert not any(where.glob("dst*"))
            (line,) = lines
            assert any(why in line for why in REASONS), line
            with pytest.raises(CheckpointError) as caught:
                load(case, case.folder)
            assert line == f"peagle-convert: error: {caught.value}\n"
        else:
            model = load(case, case.folder)
            assert check_values(case, model) >= 2
            assert cli("verify", case.folder, where / "dst", *case.options)[0] == 0
            assert same_weights(model, load(case, where / "dst"))
        verdicts.append(results[0][0])
    if len(verdicts) >= 50:
        assert 0.1 < np.mean([code == 0 for code in verdicts]) < 0.98, "all cases ended alike"
