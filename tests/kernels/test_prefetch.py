"""Prefetch of the next weights: what is asked for, by which kernels, and that no result changes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from bench import deviceless_round
from pallas_kernels import dispatch, prefetch
from pallas_kernels.device import H200
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from peagle_jax.config import ConfigError, EngineConfig

MIB = 2**20


class Requests:
    """A weight in device memory that records which of its elements were asked for."""

    def __init__(self, *shape: int, dtype=jnp.uint8):
        self.shape, self.dtype = shape, dtype
        self.times = np.zeros(shape, np.int8)
        self.at = self

    def __getitem__(self, where):
        return self.times[tuple(slice(int(x.start), int(x.start) + x.size) for x in where)]


def requested(weights: list[Requests], num_blocks: int, monkeypatch) -> list[np.ndarray]:
    """How often each element is asked for by all thread blocks together."""

    def record(times):
        assert times.size, "a request begins within the weight"
        times += 1

    monkeypatch.setattr(prefetch.plgpu, "async_prefetch", record)
    with jax.disable_jit():
        for block in range(num_blocks):
            prefetch.request(weights, jnp.int32(block), num_blocks)
    return [weight.times for weight in weights]


@pytest.mark.parametrize("num_blocks", [1, 3, 8, 1000])
@pytest.mark.parametrize("shape", [(512, 512), (5120, 256), (300, 700), (40, 96)])
def test_the_blocks_together_ask_for_each_element_once(shape, num_blocks, monkeypatch):
    (times,) = requested([Requests(*shape)], num_blocks, monkeypatch)
    assert (times == 1).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.bfloat16])
def test_a_large_weight_is_asked_for_up_to_the_limit(dtype, monkeypatch):
    (times,) = requested([Requests(40 * 1024, 1024, dtype=dtype)], 64, monkeypatch)
    rows = 24 * MIB // (1024 * jnp.dtype(dtype).itemsize)
    assert (times[:rows] == 1).all()
    assert not times[rows:].any()


def test_weights_share_the_limit_in_their_order(monkeypatch):
    weights = [Requests(20 * 1024, 1024), Requests(8 * 1024, 1024), Requests(256, 1024)]
    first, second, third = requested(weights, 64, monkeypatch)
    assert (first == 1).all()
    assert (second[: 4 * 1024] == 1).all()
    assert not second[4 * 1024 :].any()
    assert not third.any()


@pytest.mark.usefixtures("race_free")
def test_the_results_of_kernels_that_prefetch_are_the_same():
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
    weight, h, scale = draw(0, 300, 512), draw(1, 3, 512), draw(2, 512)
    norm = dict(eps=1e-5, implementation="mosaic_gpu")
    delta = draw(3, 2, 3, 512).astype(jnp.float32)
    for call in (
        lambda **ahead: [rms_norm(h, scale, **norm, **ahead)],
        lambda **ahead: add_rms_norm(h, delta, scale, **norm, **ahead),
    ):
        for ours, plain in zip(call(next_weights=(weight, scale[None])), call(), strict=True):
            np.testing.assert_array_equal(ours, plain)


def prefetched_weights(sizes: deviceless_round.Sizes) -> collections.Counter[str]:
    """Number of weights that the kernels of a round on an H200 prefetch, by name of the kernel."""
    found = collections.Counter()

    def visit(jaxpr, kernel: str) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "async_prefetch":
                found[kernel] += 1
            for inner in core.jaxprs_in_params(equation.params):
                visit(inner, equation.params.get("name", kernel))

    made = deviceless_round.programs(sizes)
    plan, mask = made.round_plan
    with dispatch.assume(H200):
        traced = jax.make_jaxpr(made.round)(made.weights, made.state, plan, mask, None)
    visit(traced.jaxpr, "")
    return found


@pytest.mark.parametrize(
    ("preset", "concurrency", "kernels"),
    [
        # Two layers, so two norms before attention, with two weights each. The first one has nothing to add.
        ("qwen3-coder-30b-a3b-fp8", 1, dict(rms_norm=2, add_rms_norm=2)),
        # 64 rows choose nearly all experts: the norms before the experts prefetch too.
        ("qwen3-coder-30b-a3b-fp8", 8, dict(rms_norm=2, add_rms_norm=4)),
        # The first weight is larger than the limit.
        ("llama-3.1-8b", 1, dict(rms_norm=1, add_rms_norm=3)),
        # A layer of Gemma norms what it adds, so no norm adds.
        ("gemma-4-31b-fp8", 1, dict(rms_norm=4)),
    ],
)
def test_which_weights_are_prefetched(preset, concurrency, kernels):
    sizes = dict(preset=preset, layers=2, concurrency=concurrency, k=7)
    assert prefetched_weights(deviceless_round.Sizes(**sizes, prefetch_weights=True)) == kernels
    assert not prefetched_weights(deviceless_round.Sizes(**sizes))


def test_several_devices_are_refused():
    with pytest.raises(ConfigError, match="prefetch_weights is for one device"):
        EngineConfig(prefetch_weights=True, tensor_parallel=2)
