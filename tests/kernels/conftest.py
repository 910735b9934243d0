"""Kernels on a CPU: Mosaic's interpreter with its race detector, and `plgpu.mma`, which
it lacks.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.primitives import mma_p
from jax.interpreters import mlir

MMA_COLUMNS = 16
"""Columns of one mma.sync of bfloat16; of e4m3 it has 32, which a sum in float32 does not show."""


def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """What `plgpu.mma` computes: acc [M, N] + a [M, K] @ b [K, N], K in ascending order, in
    float32.

    The interpreter evaluates operations that it does not know with their rule for CPUs, and jax has
    none for this one. Layouts of registers play no part in it: only a chip, or its compiler, checks
    them.
    """
    for first in range(0, a.shape[1], MMA_COLUMNS):
        part = slice(first, first + MMA_COLUMNS)
        acc = acc + jnp.dot(
            a[:, part].astype(jnp.float32),
            b[part].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
    return acc


mlir.register_lowering(mma_p, mlir.lower_fun(mma, multiple_results=False), platform="cpu")


def _matmul(a: np.ndarray, b: np.ndarray, dtype) -> np.ndarray:
    """a @ b, added in float64, so that its bits depend on the numbers alone.

    BLAS orders the sums of float32 by the sizes and strides of the matrices, on each processor in
    its own way.
    """
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)


@pytest.fixture
def interpreted(monkeypatch):
    """State of each kernel that `dispatch` interprets in this test; `races_found` says
    if it raced.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import dispatch

    detect = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(dispatch, "_interpreter", lambda kind: detect)
    # The interpreter keeps the state of its last kernel only, and prints what it finds.
    states, make = [], gpu_callbacks.GPURaceDetectionState
    record = lambda **options: states.append(make(**options)) or states[-1]
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", record)
    own_numpy = SimpleNamespace(**vars(np) | dict(matmul=_matmul))
    monkeypatch.setattr(gpu_callbacks, "np", own_numpy)
    return states


@pytest.fixture
def race_free(interpreted):
    """Kernels that `dispatch` interprets in this test must not race, and one must run."""
    yield
    assert interpreted, "no kernel was interpreted"
    assert not any(state.races_found for state in interpreted), "see the races in the output"


@pytest.fixture(params=[90, 100, 120])
def chip(request, monkeypatch):
    """Runs a test on the kernels of each chip that has some."""
    return _default(request.param, monkeypatch)


@pytest.fixture(params=[90, 100])
def wgmma_or_tcgen05(request, monkeypatch):
    """As `chip`, without RTX cards: for what their kernels share with those of Hopper."""
    return _default(request.param, monkeypatch)


def _default(sm: int, monkeypatch):
    from pallas_kernels import dispatch
    from pallas_kernels.device import GENERATIONS

    monkeypatch.setattr(dispatch, "_default_device", lambda: GENERATIONS[sm])
    return GENERATIONS[sm]
