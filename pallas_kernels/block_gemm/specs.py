"""What models ask of linear layers, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.block_gemm import api

CHIPS = api.CHIPS
MMA = {90: "wgmma", 100: "tcgen05.mma"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows times a weight [outputs, inputs], bfloat16 or fp8 in blocks; sums added to float32.

    Where the kernel leaves several partial sums, adding them up is part of the call.
    """

    rows: int
    outputs: int
    inputs: int
    fp8: bool = False
    bias: bool = False


def _layers(model: str, rows: tuple[int, ...], **shapes: tuple[int, int]) -> dict[str, Spec]:
    """Each shape (outputs, inputs) at each number of rows; a shape named *_fp8 or *_bias is so."""
    specs = {}
    for layer, (outputs, inputs) in shapes.items():
        name, *flags = layer.split("__")
        options = dict.fromkeys(flags, True)
        for R in rows:
            spec = Spec(rows=R, outputs=outputs, inputs=inputs, **options)
            specs[f"{model}-{name.replace('_', '-')}-{R}"] = spec
    return specs


# 8: one sequence with seven drafts; 12: an odd plan; 64 and 256: 8 and 32 sequences; 4096: prefill.
SPECS = {
    **_layers("qwen3-moe", (8, 12, 64, 256, 4096), qkv__fp8=(5120, 2048), o__fp8=(2048, 4096)),
    **_layers("qwen3-moe", (8, 64, 256, 4096), router=(128, 2048)),
    **_layers("qwen3-moe", (8, 12, 64, 256), lm_head=(151936, 2048)),
    # The head: the target's taps beside each other, then layers of which the first takes two inputs.
    **_layers(
        "peagle",
        (8, 64, 256),
        fc=(2048, 6144),
        first_qkv=(5120, 4096),
        o=(2048, 4096),
        gate_up=(24576, 2048),
        down=(2048, 12288),
    ),
    **_layers(
        "gpt-oss", (8, 12, 64, 4096), qkv__bias=(5120, 2880), o__bias=(2880, 4096)
    ),
    **_layers("gpt-oss", (8, 64), router__bias=(32, 2880), lm_head=(201088, 2880)),
    **_layers(
        "llama-8b",
        (8, 64, 4096),
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
    "ragged": Spec(rows=21, outputs=224, inputs=448, bias=True),
    "one-row": Spec(rows=1, outputs=192, inputs=384, fp8=True),
}  # fmt: skip


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """The kernel as a function of `args`: x, weight, scale if fp8, bias if any."""
    N, K = spec.outputs, spec.inputs
    made = jax.ShapeDtypeStruct
    blocks = (-(-N // formats.BLOCK), -(-K // formats.BLOCK))
    args = (
        made((spec.rows, K), jnp.bfloat16),
        made((N, K), jnp.float8_e4m3fn if spec.fp8 else jnp.bfloat16),
        *([made(blocks, jnp.float32)] if spec.fp8 else []),
        *([made((N,), jnp.bfloat16)] if spec.bias else []),
    )

    def run(x, weight, *rest):
        return api.linear(
            x, weight, scale=rest[0] if spec.fp8 else None, bias=rest[-1] if spec.bias else None,
            out_dtype=jnp.float32, implementation="mosaic_gpu",
        )  # fmt: skip

    return run, args


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Arguments for `build`: normal numbers, and scales that are positive."""
    shapes = build(spec)[1]
    arrays = [
        jax.random.normal(jax.random.fold_in(key, i), x.shape).astype(x.dtype)
        for i, x in enumerate(shapes)
    ]
    if spec.fp8:
        arrays[2] = jnp.exp(arrays[2])
    return tuple(arrays)
