"""Threads read swizzled shared memory at the addresses to which TMA wrote it, which no interpreter
models.

TMA exchanges the 16-byte units of a row of 128 bytes by address: bits 7 to 9 change bits 4 to 6
(bits 7 and 8 change 4 and 5 with a swizzle of 64 bytes, bit 7 changes 4 with 32). Mosaic computes
the addresses of threads from the start of the slice that is loaded or stored. Both agree if the
slice starts at a multiple of the period, which is 8 times the swizzle. Otherwise units of other
columns are read, and nothing reports it.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from lab import deviceless
from lab.specs import verify_attention as specs
from pallas_kernels import dispatch
from pallas_kernels import mlir_compat as mlir
from pallas_kernels.device import H200

_SHARED = "#gpu.address_space<workgroup>"
_SAME_START = {"memref.cast", "memref.transpose", "memref.collapse_shape", "memref.expand_shape"}


def _alignment(ref: ir.Value) -> int:
    """The largest power of two, up to 1,024, that divides the address of `ref` in shared memory, in
    bytes."""
    op = ref.owner
    if op.name == "memref.view":
        shift = op.operands[1].owner
        assert shift.name == "arith.constant", shift
        return math.gcd(1024, ir.IntegerAttr(shift.attributes["value"]).value)
    if op.name in _SAME_START:
        return _alignment(op.operands[0])
    assert op.name == "memref.subview", f"what does {op.name} do to an address?"
    source = op.operands[0]
    dynamic = ir.ShapedType.get_dynamic_size()
    strides, _ = source.type.get_strides_and_offset()
    assert dynamic not in strides
    unit = source.type.element_type.width // 8
    found = _alignment(source)
    for offset, stride in zip(op.attributes["static_offsets"], strides, strict=True):
        found = math.gcd(found, stride * unit * (1 if offset == dynamic else offset))
    return found


@pytest.fixture
def inside_a_period(monkeypatch) -> Iterator[list[str]]:
    """Slices that kernels lowered in this test load or store, and that start inside a period of the
    swizzle."""
    found, checked = [], []
    transfer = mlir.FragmentedArray.transfer_tiled

    def check(ref, swizzle, *args, **kwargs):
        # 16: no swizzle. Without an operand it is a dummy, with which Mosaic compares layouts.
        if swizzle > 16 and str(ref.type.memory_space) == _SHARED and len(ref.owner.operands):
            checked.append(ref)
            if _alignment(ref) % (8 * swizzle):
                found.append(f"{ref.type}: swizzle {int(swizzle)}, aligned to {_alignment(ref)}")
        return transfer(ref, swizzle, *args, **kwargs)

    monkeypatch.setattr(mlir.FragmentedArray, "transfer_tiled", staticmethod(check))
    yield found
    assert checked


def lower(function, args, device) -> None:
    with dispatch.assume(device):
        jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("columns", "wrong"), [(slice(64, 128), True), (slice(0, 64), False)])
def test_the_fixture_finds_a_slice_of_columns_of_a_tile_of_four_rows(
    columns, wrong, inside_a_period
):
    """Four rows do not fill a swizzle tile; of 128 columns the last 64."""

    def body(x_gmem, out_gmem, rows_smem, barrier):
        for first in (0, 4):
            rows = slice(first, first + 4)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], rows_smem.at[rows], barrier)
        plgpu.barrier_wait(barrier)
        part_smem = rows_smem.at[:, columns]
        out_gmem[...] = plgpu.load(part_smem, layout=plgpu.Layout.WGMMA, optimized=False)

    scratch = [plgpu.SMEM((64, 128), jnp.bfloat16), plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), scratch_types=scratch
    )
    lower(kernel, [jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)], H200)
    assert bool(inside_a_period) == wrong


ATTENTION = (
    "qwen3-moe-many",  # 8 query heads per kv head
    "llama-8b-many",  # 4
    "gemma-31b-local-one",  # 2, a head dim of 256
    "qwen2.5-7b-one",  # 7
    "embedded",  # 2, a head dim of 64
    "qwen3-moe-fp8-cache",
)


@pytest.mark.sampled(2, slow=4)
@pytest.mark.parametrize("spec", ATTENTION)
def test_slices_of_attention_start_at_a_period(chip, spec, inside_a_period):
    lower(*specs.build(specs.SPECS[spec]), chip)
    assert not inside_a_period


@pytest.mark.sampled(0, slow=8)
@pytest.mark.parametrize("op", ["block_gemm", "moe", "quantize"])
def test_slices_of_other_operations_start_at_a_period(op, chip, inside_a_period):
    for spec in deviceless.spread(deviceless.specs_on(op, chip), 1).values():
        lower(*deviceless.specs_of(op).build(spec), chip)
    assert not inside_a_period
