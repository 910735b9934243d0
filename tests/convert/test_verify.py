"""`verify` finds every mistake that conversion could make, those too that the way back would undo."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from convert import blocks, decode, expected
from convert.source import Reader
from pallas_kernels import formats
from peagle_jax.checkpoint import transforms
from peagle_jax.checkpoint.layout import Table
from peagle_jax.checkpoint.transforms import (
    IN_ORDER,
    Concat,
    Copy,
    Deinterleave,
    Merge,
    Scales,
    Stack,
    StackScales,
    Transpose,
)
from tests.convert.conftest import GOLDEN, ROOT, same_files

TRANSFORMS = {
    cls
    for cls in vars(transforms).values()
    if inspect.isclass(cls) and hasattr(cls, "join") and cls is not transforms.Transform
}


def halves_exchanged(monkeypatch, transform: type) -> None:
    """Parameters of one tensor are written with their second half first."""
    original = blocks._runs

    def runs(member):
        for block in original(member):
            if type(member.rule.transform) is transform and len(block.pieces) == 1:
                (piece,) = block.pieces
                middle = (piece.end - piece.begin) // 2
                second = replace(piece, begin=piece.begin + middle)
                first = replace(piece, end=piece.begin + middle, offset=piece.end - second.begin)
                block = replace(block, pieces=(second, first))
            yield block

    monkeypatch.setattr(blocks, "_runs", runs)


def last_tensor_first(monkeypatch, transform: type) -> None:
    """Parameters of several tensors are written in another order than their rule says."""
    original = blocks._runs

    def runs(member):
        if type(member.rule.transform) is transform:
            member = replace(member, infos=member.infos[::-1])
        return original(member)

    monkeypatch.setattr(blocks, "_runs", runs)


def tables(method: str, change: Callable) -> Callable:
    """A mistake in the table of a family: `change` gets and returns the arguments of a method."""

    def plant(monkeypatch, transform: type) -> None:
        original = getattr(Table, method)
        wrong = lambda self, *args, **kwargs: original(self, *change(*args), **kwargs)
        monkeypatch.setattr(Table, method, wrong)

    return plant


def joins(join: Callable, split: Callable) -> Callable:
    """`join(right, array)` and `split`, which undoes it, around those of a transform."""

    def plant(monkeypatch, transform: type) -> None:
        right, back = transform.join, transform.split
        monkeypatch.setattr(transform, "join", lambda self, parts: join(right(self, parts)))
        wrong = lambda self, array, like: back(self, np.ascontiguousarray(split(array)), like)
        monkeypatch.setattr(transform, "split", wrong)

    return plant


@dataclass(frozen=True)
class Planted:
    """A mistake, a checkpoint that it damages, and whether `export` undoes it."""

    transform: type
    name: str
    checkpoint: str
    plant: Callable
    undone: bool = True


def norms_exchanged(path, name, size):
    pair = ("input_layernorm", "post_attention_layernorm")
    if pair[0] in name:
        return path, name.replace(*pair), size
    return path, name.replace(*pair[::-1]), size


def layers_exchanged(path, name, *rest):
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    found = next((old for old in other if old in name), None)
    return path, name.replace(found, other[found]) if found else name, *rest


def reversed_parts(path, bases, rows, *rest):
    return path, bases[::-1], rows[::-1], *rest


def up_before_gate(path, bases, group, shape):
    if not group:
        return path, bases, group, shape
    return (
        path,
        [base for pair in zip(bases[1::2], bases[::2], strict=True) for base in pair],
        group,
        shape,
    )


def experts_exchanged(path, bases, group, shape):
    return path, bases if group else bases[::-1], group, shape


FLIP = (lambda x: np.flip(x, 1), lambda x: np.flip(x, 1))
ROLL = (lambda x: np.roll(x, 1, axis=0), lambda x: np.roll(x, -1, axis=0))
LAST_ROW = (lambda x: np.roll(x, 1, axis=-2), lambda x: np.roll(x, -1, axis=-2))
PLANTED = [
    Planted(Copy, "norms exchanged", "llama", tables("vector", norms_exchanged)),
    Planted(Copy, "halves exchanged", "qwen3", halves_exchanged, undone=False),
    Planted(Merge, "layers exchanged", "gpt_oss-mxfp4", tables("packed", layers_exchanged)),
    Planted(Merge, "halves exchanged", "gemma4", halves_exchanged, undone=False),
    Planted(Merge, "halves exchanged", "gpt_oss-mxfp4", halves_exchanged, undone=False),
    Planted(Concat, "v, k, q", "qwen3", tables("linear", reversed_parts)),
    Planted(Concat, "biases of v, k, q", "gpt_oss-bf16", tables("bias", reversed_parts)),
    Planted(Concat, "up, gate", "llama", last_tensor_first, undone=False),
    Planted(Stack, "up before gate", "qwen3_moe-bf16", tables("experts", up_before_gate)),
    Planted(Stack, "experts exchanged", "qwen3_moe-fp8", tables("experts", experts_exchanged)),
    Planted(Stack, "written in another order", "qwen3_moe-bf16", last_tensor_first, undone=False),
    Planted(Deinterleave, "up before gate", "gpt_oss-mxfp4", joins(*FLIP)),
    Planted(Deinterleave, "up before gate", "gpt_oss-bf16", joins(*FLIP)),
    Planted(Transpose, "columns off by one", "gpt_oss-bf16", joins(*LAST_ROW)),
    Planted(Scales, "off by a row", "qwen3-fp8-channel", joins(*ROLL)),
    Planted(Scales, "off by a row", "llama-fp8-tensor", joins(*ROLL)),
    Planted(Scales, "off by a block", "qwen3_moe-fp8", joins(*ROLL)),
    Planted(StackScales, "off by an expert", "qwen3_moe-fp8", joins(*ROLL)),
]  # fmt: skip


def test_a_mistake_is_planted_for_every_transform():
    assert {planted.transform for planted in PLANTED} == TRANSFORMS
    # What is not copied in order is made by `join`, and there `split` could hide a mistake.
    made = TRANSFORMS - set(IN_ORDER)
    assert {one.transform for one in PLANTED if one.undone} >= made
    assert {one.transform for one in PLANTED if not one.undone} >= set(IN_ORDER)


@pytest.mark.sampled(3, slow=5)
@pytest.mark.parametrize(
    "planted", PLANTED, ids=lambda one: f"{one.transform.name}: {one.name}: {one.checkpoint}"
)
def test_a_planted_mistake_is_found(planted, cli, tmp_path, monkeypatch):
    src, dst = GOLDEN / planted.checkpoint, tmp_path / "dst"
    planted.plant(monkeypatch, planted.transform)
    assert cli("convert", src, dst)[0] == 0
    if planted.undone:  # neither the sums nor the way back show it
        assert cli("export", dst, tmp_path / "back")[0] == 0
        assert same_files(src, tmp_path / "back")
    code, out, err = cli("verify", src, dst, "--no-logits")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "differs from the source" in err


def test_another_dtype_under_the_same_bits_is_found(cli, tmp_path, monkeypatch):
    original = blocks.blocks_of
    wrong = lambda *args: replace(original(*args), dtype=np.dtype(np.float16))
    monkeypatch.setattr("convert.plan.blocks_of", wrong)
    assert cli("convert", GOLDEN / "qwen3_moe-bf16", tmp_path / "dst")[0] == 0
    code, _, err = cli("verify", GOLDEN / "qwen3_moe-bf16", tmp_path / "dst", "--no-logits")
    assert code == 1
    assert "it is F16, its tensors are BF16" in err


def test_a_mistake_in_reading_the_source_is_found(cli, tmp_path, monkeypatch):
    original = Reader._place

    def two_bytes_before(self, name, begin):
        descriptor, at = original(self, name, begin)
        return descriptor, at - 2

    monkeypatch.setattr(Reader, "_place", two_bytes_before)
    assert cli("convert", GOLDEN / "llama", tmp_path / "dst")[0] == 0
    code, _, err = cli("verify", GOLDEN / "llama", tmp_path / "dst", "--no-logits")
    assert code == 1
    assert "embed.weight in weights/0000 differs from the source: entry 0 of its first axis" in err


@pytest.mark.parametrize("kept", ["model.norm.weight", "lm_head.weight"])
def test_a_tensor_that_was_dropped_though_the_model_needs_it_is_found(
    kept, cli, tmp_path, monkeypatch
):
    original = Table.layout

    def layout(self, drop=None):
        found = original(self)
        rules = [rule for rule in found.rules if rule.names != (kept,)]
        return replace(found, rules=rules, dropped=found.dropped | {kept: "no reason"})

    monkeypatch.setattr(Table, "layout", layout)
    assert cli("convert", GOLDEN / "llama", tmp_path / "dst")[0] == 0
    code, _, err = cli("verify", GOLDEN / "llama", tmp_path / "dst", "--no-logits")
    assert code == 1
    assert f"tensor {kept!r} is kept as unused; the model needs it" in err


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{}")]
)
def test_a_damaged_header_that_export_needs_is_found(damage, cli, tmp_path):
    assert cli("convert", GOLDEN / "llama", tmp_path / "dst")[0] == 0
    damage(tmp_path / "dst" / "source" / "model.safetensors.header")
    code, _, err = cli("verify", GOLDEN / "llama", tmp_path / "dst", "--no-logits")
    assert code == 1
    assert "is not the header of llama's model.safetensors" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["decode", "expected"])
def test_the_second_statement_shares_no_code_with_conversion(name):
    tree = ast.parse((ROOT / "convert" / f"{name}.py").read_text(encoding="utf-8"))
    project = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module.split(".")[0] in ("convert", "peagle_jax", "pallas_kernels")
    }
    assert {one for one in project if not one.startswith("convert.decode.")} <= {
        "peagle_jax.checkpoint.safetensors.CheckpointError"
    }
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules <= {"json", "re", "numpy"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("F8_E4M3", ml_dtypes.float8_e4m3fn)],
)
def test_every_bit_pattern_decodes_to_the_number_of_its_dtype(name, dtype):
    width = np.dtype(dtype).itemsize
    bits = np.arange(256**width, dtype=f"u{width}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        got, want = decode.numbers(bits, name), bits.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_mxfp4_decodes_as_the_kernels_do_it():
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (6, 64), np.uint8)
    scales = random.integers(100, 150, (6, 4), np.uint8)
    want = formats.dequantize(packed, scales, np.float32)
    np.testing.assert_array_equal(decode.mxfp4_numbers(packed, scales), want)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1), (200, 3), (2, 3)])
def test_an_fp8_scale_reaches_the_rows_and_columns_of_its_block(shape):
    scale = np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)
    bits, numbers = decode.fp8_scale_grid(scale.view(np.uint32), "F32", 200, 300)
    assert bits.tobytes() == numbers.tobytes()
    got = np.repeat(numbers, 128, axis=1)[:, :300]
    joined = Scales((200,), 300).join([scale])
    want = formats.dequantize(np.ones((200, 300), ml_dtypes.float8_e4m3fn), joined, np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(3, 3), (200, 2), (2, 2)])
def test_a_stored_scale_of_no_known_form_has_no_meaning(shape):
    assert expected.stored_grid(np.ones(shape), (200, 300)) is None
