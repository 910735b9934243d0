"""Kernels on a CPU: Mosaic's interpreter, watched for races."""

import pytest


@pytest.fixture
def race_free(monkeypatch):
    """Kernels that `dispatch` interprets in this test must not race, and one must run."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import dispatch

    detect = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(dispatch, "_interpreter", lambda kind: detect)
    # The interpreter keeps the state of its last kernel only, and prints what it finds.
    states, make = [], gpu_callbacks.GPURaceDetectionState
    record = lambda **options: states.append(make(**options)) or states[-1]
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", record)
    yield
    assert states, "no kernel was interpreted"
    assert not any(state.races_found for state in states), "see the races in the output"


@pytest.fixture(params=[90, 100])
def chip(request, monkeypatch):
    """Runs a test on the kernels of each chip that has some."""
    from pallas_kernels import dispatch
    from pallas_kernels.device import B200, H200

    device = {90: H200, 100: B200}[request.param]
    monkeypatch.setattr(dispatch, "_default_device", lambda: device)
    return device
