"""Products with mma.sync (sm_120): registers, and what the interpreter computes in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels import mlir_compat as mlir
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import RTX5090
from pallas_kernels.weight_tiles.format import Format
from tests.kernels.test_mxfp4_mosaic import registers


@pytest.mark.parametrize("columns", [16, 64])
def test_an_operand_of_mma_is_in_the_registers_of_wgmma(columns):
    """`as_operand` gives registers another layout and moves nothing; no interpreter
    sees registers.
    """
    numbers = np.arange(64 * columns).reshape(64, columns)
    to = plgpu.Layout.MMA_LHS(jnp.bfloat16).to_mgpu()
    found, wanted = registers(numbers, mlir.WGMMA_LAYOUT), registers(numbers, to)
    assert np.array_equal(found, wanted)


def test_sums_of_mma_are_in_the_registers_of_wgmma():
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        assert plgpu.Layout.MMA_ACC(dtype).to_mgpu() == mlir.WGMMA_LAYOUT


def test_the_interpreter_adds_products_in_ascending_order():
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (jax.random.normal(k, (64, 64), jnp.bfloat16) for k in keys[:2])
    acc = jax.random.normal(keys[2], (64, 64)) * 2.0**12
    found = jax.jit(plgpu.mma)(acc, a, b)
    whole = np.asarray(acc, np.float64) + np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert np.abs(found - whole).max() < 4 * 2.0**-23 * np.abs(whole).max()
    in_parts = acc
    for i in range(0, 64, 16):
        in_parts = jax.jit(plgpu.mma)(in_parts, a[:, i : i + 16], b[i : i + 16])
    assert np.array_equal(found, in_parts)


@pytest.mark.parametrize("chip", [120], indirect=True)
@pytest.mark.parametrize("fenced", [True, False])
def test_a_slot_that_threads_read_is_fenced_before_it_is_filled_again(
    chip, fenced, interpreted, monkeypatch
):
    """ldmatrix reads as a thread does: without a fence the next copy may overtake it."""
    monkeypatch.setattr(Format, "read_by_threads", fenced)
    x, w = (jnp.ones((rows, 1024), jnp.bfloat16) for rows in (8, 64 + 64 * fenced))
    assert (linear(x, w, implementation="mosaic_gpu") == 1024).all()
    assert interpreted
    assert any(state.races_found for state in interpreted) != fenced


@pytest.mark.parametrize(("K", "fits"), [(16384, True), (32768, False)])
def test_a_tile_that_does_not_fit_into_shared_memory_is_refused(K, fits):
    """The scales of a whole row of mxfp4 tiles lie in shared memory, of which an RTX card has 99
    KB.
    """
    made = jax.ShapeDtypeStruct
    weight = made((320, K // 2), jnp.uint8), made((320, K // 32), jnp.uint8)
    run = lambda x, w, scale: linear(x, w, scale=scale, implementation="mosaic_gpu")
    call = lambda: jax.eval_shape(run, made((64, K), jnp.bfloat16), *weight)
    with dispatch.assume(RTX5090):
        if fits:
            assert call().shape == (64, 320)
            return
        with pytest.raises(
            NotImplementedError, match=r"101376 bytes.*use implementation='reference'"
        ):
            call()
