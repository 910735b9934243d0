"""Kernels on a CPU: Mosaic's interpreter with its race detector."""

from types import SimpleNamespace

import numpy as np
import pytest


def _matmul(a: np.ndarray, b: np.ndarray, dtype) -> np.ndarray:
    """a @ b, added in float64, so that its bits depend on the numbers alone.

    BLAS orders the sums of float32 by the sizes and strides of the matrices, on each processor in
    its own way.
    """
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)


@pytest.fixture
def interpreted(monkeypatch):
    """State of each kernel that `dispatch` interprets here; `races_found` says if it raced."""
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


@pytest.fixture(params=[90, 100])
def chip(request, monkeypatch):
    """Runs a test on the kernels of each chip that has some."""
    from pallas_kernels import dispatch
    from pallas_kernels.device import GENERATIONS

    monkeypatch.setattr(dispatch, "_default_device", lambda: GENERATIONS[request.param])
    return GENERATIONS[request.param]
