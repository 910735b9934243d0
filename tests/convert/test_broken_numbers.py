"""Scales without a value are refused; NaN and infinity are counted and named."""

from pathlib import Path

import numpy as np
import pytest

from peagle_jax.checkpoint import CheckpointError, load_target
from peagle_jax.checkpoint.safetensors import DTYPES
from peagle_jax.checkpoint.values import NotFinite, check_scale, not_finite
from tests.convert.conftest import GOLDEN
from tests.convert.test_refused import refused
from tests.golden.folders import parts, written


def edited(name: str, folder: Path, **changes) -> Path:
    """A golden folder; the last numbers of some tensors are others."""
    raw, held = parts(name)
    for tensor, values in changes.items():
        flat = held[tensor].reshape(-1)
        flat[len(flat) - len(values) :] = np.array(values, np.float64).astype(flat.dtype)
    return written(folder, raw, held)


LAYER = "model.layers.1."
SCALES = {
    "qwen3_moe-fp8": LAYER + "mlp.experts.2.up_proj.weight_scale_inv",
    "qwen3-fp8-channel": LAYER + "self_attn.k_proj.weight_scale",
    "llama-fp8-tensor": LAYER + "mlp.down_proj.weight_scale",
    "gpt_oss-mxfp4": LAYER + "mlp.experts.down_proj_scales",
}
BROKEN = {"NaN": np.nan, "infinite": np.inf, "negative": -0.5, "zero": 0.0, "minus zero": -0.0}


@pytest.mark.sampled(8, slow=4)
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in [*SCALES][:3] for value in BROKEN.values()]
    + [("gpt_oss-mxfp4", 255)],
)
def test_a_scale_without_a_value_is_refused_wherever_it_is_read(name, value, cli, tmp_path):
    folder = edited(name, tmp_path / "src", **{SCALES[name]: [value]})
    refused(cli("plan", folder), SCALES[name], "1 of ")
    refused(cli("convert", folder, tmp_path / "dst"), SCALES[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    with pytest.raises(CheckpointError, match=f"{folder}: {SCALES[name]}: 1 of "):
        load_target(folder, dtype="float32")


def test_a_scale_that_was_damaged_after_it_was_converted_is_refused(cli, tmp_path):
    assert cli("convert", GOLDEN / "gpt_oss-mxfp4", tmp_path / "dst")[0] == 0
    (chunk,) = (tmp_path / "dst" / "weights" / "0000" / "layers.1.mlp.down.scale").glob("0.*")
    with chunk.open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.scale: 1 of "):
        load_target(tmp_path / "dst", dtype="float32")


@pytest.mark.parametrize("value", [1e-60, 1e60])
def test_a_scale_counts_as_what_a_model_holds(value):
    """float64 in a file, float32 in a model: zero and infinite."""
    with pytest.raises(CheckpointError, match="1 of 3 FP8 scales"):
        check_scale("s", np.array([1.0, value, 2.0]))


FLOATS = [name for name, dtype in DTYPES.items() if "float" in dtype.name]


@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_pattern_is_counted_as_numpy_sees_it(name, num_cases):
    dtype, random = DTYPES[name], np.random.default_rng(0)
    if dtype.itemsize <= 2:
        values = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    else:
        number = num_cases("floats of any bits", 20_000)
        special = [np.nan, -np.nan, np.inf, -np.inf, np.finfo(dtype).max, -0.0, 1e-45]
        values = np.concatenate(
            [np.array(special, dtype), np.frombuffer(random.bytes(number * dtype.itemsize), dtype)]
        )
    want = NotFinite(int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    assert not_finite(random.permutation(values)) == want
    for one in values[: 256 if dtype.itemsize == 1 else 7]:  # alone, as a screen would meet it
        assert any(not_finite(np.array([one]))) == (not np.isfinite(one))


LINE = (
    "2 tensors hold numbers that are not finite: model.layers.1.mlp.up_proj.weight (1 infinite), "
    "model.layers.1.self_attn.k_proj.weight (2 NaN, 1 infinite)"
)


@pytest.fixture
def spoilt(tmp_path) -> Path:
    values = {"self_attn.k_proj": [np.nan, -np.inf, np.nan], "mlp.up_proj": [np.inf]}
    broken = {f"{LAYER}{name}.weight": some for name, some in values.items()}
    return edited("llama", tmp_path / "first", **broken)


def test_weights_that_are_not_finite_are_named_by_every_command(spoilt, cli, tmp_path):
    dst = tmp_path / "dst"
    code, out, err = cli("convert", spoilt, dst)
    assert (code, err) == (0, "")
    assert LINE in out.splitlines()
    code, out, _ = cli("verify", spoilt, dst)
    assert code == 0
    assert LINE in out.splitlines()
    assert cli("export", dst, tmp_path / "back")[0] == 0
    same = [(folder / "model.safetensors").read_bytes() for folder in (spoilt, tmp_path / "back")]
    assert same[0] == same[1]
