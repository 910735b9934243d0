"""Linear-layer workloads of supported models, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats, fp8_tiles
from pallas_kernels.activations import Activations
from pallas_kernels.block_gemm import api

MMA = {90: "wgmma", 100: "tcgen05.mma"}
MMA_OF_QUANTIZED_ROWS = {
    90: r"wgmma.*\.e4m3\.e4m3$",
    100: r"tcgen05\.mma.*\.kind::f8f6f4$",
}
"""The chip's own fp8 instruction: both operands are e4m3, so that no weight is unpacked."""

Form = Literal["bf16", "fp8", "fp8_rows", "fp8_tiles", "fp8_tiles_rows", "mxfp4"]
"""Weight format: bfloat16, fp8 with one scale per block or per row, both in tiles, or mxfp4."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows times a weight [outputs, inputs], float32 result; `half`: float16 rows, as
    norms store them for tiles.

    The call includes the addition of the partial sums of a K-split, and with fp8 activations their
    quantisation.
    """

    rows: int
    outputs: int
    inputs: int
    form: Form = "bf16"
    bias: bool = False
    half: bool = False
    activations: Activations = "bf16"

    @property
    def chips(self) -> tuple[int, ...]:
        """Generations with a kernel for it."""
        return chips_of(self.form)

    @property
    def x_dtype(self) -> jnp.dtype:
        """The dtype of the rows before they are quantised."""
        return jnp.dtype(jnp.float16 if self.half else jnp.bfloat16)

    @property
    def mma(self) -> dict[int, str]:
        """Required matrix instruction, as `MMA`."""
        return MMA_OF_QUANTIZED_ROWS if self.activations == "fp8" else MMA


def chips_of(form: Form) -> tuple[int, ...]:
    """Generations with a kernel for weights of a format."""
    return api.CHIPS_OF.get(form.removesuffix("_rows"), dispatch.CHIPS)


def _layers(model: str, rows: tuple[int, ...], **shapes: tuple[int, int]) -> dict[str, Spec]:
    """Specs of each shape (outputs, inputs) at each number of rows; name suffixes: __fp8, __bias,
    __half."""
    specs = {}
    for layer, (outputs, inputs) in shapes.items():
        name, *flags = layer.split("__")
        options = {flag: True for flag in flags if flag in ("bias", "half")}
        forms = [flag for flag in flags if flag not in options] or ["bf16"]
        for R in rows:
            spec = Spec(rows=R, outputs=outputs, inputs=inputs, form=forms[0], **options)
            specs[f"{model}-{name.replace('_', '-')}-{R}"] = spec
    return specs


# 8: one sequence with seven drafts; 12: an odd batch; 64, 256 and 1024: 8, 32 and 128 sequences;
# 4096: prefill.
SPECS = {
    **_layers(
        "qwen3-moe", (8, 12, 64, 256, 1024, 4096), qkv__fp8=(5120, 2048), o__fp8=(2048, 4096)
    ),
    **_layers(
        "qwen3-moe-tiles",
        (8, 64, 256, 1024, 4096),
        qkv__fp8_tiles__half=(5120, 2048),
        o__fp8_tiles=(2048, 4096),
    ),
    **_layers("qwen3-moe", (8, 64, 256, 1024, 4096), router=(128, 2048)),
    **_layers("qwen3-moe", (8, 12, 64, 256, 1024), lm_head=(151936, 2048)),
    # The drafter: fc reads three concatenated taps, and the first layer reads two concatenated
    # inputs.
    **_layers(
        "peagle",
        (8, 64, 256),
        fc=(2048, 6144),
        first_qkv=(5120, 4096),
        o=(2048, 4096),
        gate_up=(24576, 2048),
        down=(2048, 12288),
    ),
    **_layers("gpt-oss", (8, 12, 64, 4096), qkv__bias=(5120, 2880), o__bias=(2880, 4096)),
    **_layers("gpt-oss", (8, 64), router__bias=(32, 2880), lm_head=(201088, 2880)),
    **_layers(
        "llama-8b",
        (8, 64, 256, 4096),
        qkv=(6144, 4096),
        o=(4096, 4096),
        gate_up=(28672, 4096),
        down=(4096, 14336),
    ),
    **_layers(
        "gemma-31b",
        (8, 64),
        qkv__fp8=(16384, 5376),
        o__fp8=(5376, 8192),
        gate_up__fp8=(43008, 5376),
        down__fp8=(5376, 21504),
    ),
    **_layers(
        "gemma-31b-tiles",
        (8, 64, 256),
        gate_up__fp8_tiles__half=(43008, 5376),
        down__fp8_tiles=(5376, 21504),
    ),
    **{
        f"qwen3-moe-fp8-{name}-{R}": Spec(
            rows=R, outputs=N, inputs=K, form="fp8", activations="fp8"
        )
        for name, N, K in (("qkv", 5120, 2048), ("o", 2048, 4096))
        for R in (8, 64, 256, 1024, 4096)
    },
    "ragged": Spec(rows=21, outputs=224, inputs=448, bias=True),
    "one-row": Spec(rows=1, outputs=192, inputs=384, form="fp8"),
    **_layers("mxfp4", (8, 64, 4096), wide__mxfp4=(5120, 2880)),
    **_layers("per-row", (8, 64, 4096), wide__fp8_rows=(5120, 2816)),
    **_layers("per-row-tiles", (64,), wide__fp8_tiles_rows__half=(5120, 2816)),
    "mxfp4-ragged": Spec(rows=21, outputs=224, inputs=320, form="mxfp4"),
    "per-row-ragged": Spec(rows=21, outputs=224, inputs=384, form="fp8_rows"),
}


def weight_of(form: Form, *shape: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the values of a weight [..., N, K], and of its scale, if any."""
    *leading, N, K = shape
    shaped = jax.ShapeDtypeStruct
    match form:
        case "bf16":
            return [shaped(shape, jnp.bfloat16)]
        case "mxfp4":
            scale = shaped((*leading, N, K // formats.GROUP), jnp.uint8)
            return [shaped((*leading, N, K // 2), jnp.uint8), scale]
        case "fp8" | "fp8_tiles":
            scale = -(-N // formats.BLOCK), -(-K // formats.BLOCK)
        case "fp8_rows" | "fp8_tiles_rows":
            scale = N, 1
    if form.startswith("fp8_tiles"):
        shape = fp8_tiles.tiled_shape(shape)
    return [shaped(shape, jnp.float8_e4m3fn), shaped((*leading, *scale), jnp.float32)]


def random_leaf(shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Random array: normal numbers; float32 scales are positive; uint8 codes give scales below
    2."""
    if shape.dtype == jnp.uint8:
        return jax.random.randint(key, shape.shape, 118, 128).astype(jnp.uint8)
    values = jax.random.normal(key, shape.shape)
    return jnp.exp(values) if shape.dtype == jnp.float32 else values.astype(shape.dtype)


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of x, weight[, scale][, bias]."""
    N, K = spec.outputs, spec.inputs
    weight = weight_of(spec.form, N, K)
    args = (
        jax.ShapeDtypeStruct((spec.rows, K), spec.x_dtype),
        *weight,
        *([jax.ShapeDtypeStruct((N,), jnp.bfloat16)] if spec.bias else []),
    )

    def run(x, weight, *others):
        scale = None if spec.form == "bf16" else others[0]
        return api.linear(
            x,
            weight,
            scale=scale,
            bias=others[-1] if spec.bias else None,
            out_dtype=jnp.float32,
            activations=spec.activations,
            implementation="mosaic_gpu",
        )

    return run, args


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`, see `random_leaf`."""
    shapes = build(spec)[1]
    return tuple(random_leaf(x, jax.random.fold_in(key, i)) for i, x in enumerate(shapes))
