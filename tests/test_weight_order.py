"""The order of weights: which engines read tiles, and texts that do not depend on it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import column_tiles, dispatch, formats
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import B200, CPU, H200
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.checkpoint import save_target
from peagle_jax.config import ConfigError, ExpertsConfig
from peagle_jax.devices import Devices
from peagle_jax.models import weight_order
from peagle_jax.models.experts import ExpertLinear
from peagle_jax.models.layers import Linear
from peagle_jax.models.quant import quantize_fp8
from peagle_jax.models.weight_order import order_weights, quantized_weights, tile_columns
from peagle_jax.parallel.partition import AXIS
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

SIZES = dict(
    **tiny.ONE_LAYER,
    vocab_size=256,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=256,
    family="qwen3_moe",
    experts=ExpertsConfig(num_experts=4, top_k=2),
)
"""Shares of two devices are whole tiles."""
CONFIG = EngineConfig(
    num_draft=0, max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2
)


def in_fp8(sizes=SIZES, dtype=jnp.float32):
    model = tiny.target(**sizes, dtype=dtype)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear | ExpertLinear):
            values, scale = map(jax.numpy.asarray, quantize_fp8(np.asarray(module.weight[...])))
            module.weight, module.scale = nnx.Param(values), nnx.Param(scale)
    return model


def kinds(model) -> set[str]:
    return {formats.kind(*weight) for _, weight in quantized_weights(model)}


def ordered(model, chip, activations: str = "bf16"):
    with dispatch.assume(chip):
        order_weights(model, activations)
    return model


PROMPTS = [np.random.default_rng(3).integers(2, 128, n).tolist() for n in (1, 7, 30)]


def texts(target, **changes) -> list[list[int]]:
    engine = one_bucket(Engine(target, None, replace(CONFIG, **changes)))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return [done.tokens for done in engine.generate(PROMPTS, params)]


def test_hopper_reads_tiles_and_others_rows():
    model = in_fp8()
    leaves = jax.tree.leaves(model)
    before = [np.array(leaf) for leaf in leaves]
    assert kinds(ordered(model, B200)) == kinds(ordered(model, H200, "fp8")) == {"fp8"}
    assert all(one is other for one, other in zip(leaves, jax.tree.leaves(model), strict=True))
    layer = ordered(model, H200).layers[0]
    assert any(leaf.is_deleted() for leaf in leaves)  # the device holds no weight twice
    tiled = layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down
    assert {formats.kind(one.weight[...], one.scale[...]) for one in tiled} == {"fp8_tiles"}
    for chip, activations in ((H200, "fp8"), (CPU, "bf16")):
        assert kinds(ordered(ordered(model, H200), chip, activations)) == {"fp8"}
    pairs = zip(before, jax.tree.leaves(model), strict=True)
    assert all((one == other).all() for one, other in pairs)


def test_shapes_change_as_weights_do():
    shaped = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shapes = ordered(jax.tree.map(shaped, in_fp8()), H200)
    wanted = jax.tree.map(shaped, ordered(in_fp8(), H200))
    assert jax.tree.leaves(shapes) == jax.tree.leaves(wanted)


def test_the_text_does_not_depend_on_the_order():
    model = in_fp8()
    wanted = tiny.greedy(model, PROMPTS, 8)
    assert texts(ordered(model, H200)) == wanted


@pytest.mark.slow
def test_two_devices_share_tiles():
    wanted = tiny.greedy(in_fp8(), PROMPTS, 8)
    model = ordered(Devices(2).placed(in_fp8()), H200)
    assert kinds(model) >= {"fp8_tiles"}
    shared = [v for _, (v, _) in quantized_weights(model) if not v.sharding.is_fully_replicated]
    assert shared
    assert texts(model, tensor_parallel=2) == wanted


def test_tiles_of_one_device_are_cut_as_rows_for_several():
    model = ordered(in_fp8(), H200)
    both = Devices(2).placed(model), Devices(2).placed(in_fp8())
    pairs = zip(*map(jax.tree.leaves, both), strict=True)
    assert all(one.shape == other.shape and (one == other).all() for one, other in pairs)
    assert kinds(model) >= {"fp8_tiles"}


def test_shares_that_are_not_whole_tiles_stay_in_rows():
    devices = Devices(2)
    values, scale = map(jax.numpy.asarray, quantize_fp8(np.ones((192, 256), np.float32)))
    for spec, kind in ((PartitionSpec(AXIS), "fp8"), (PartitionSpec(), "fp8_tiles")):
        one = Linear(256, 192, bias=False, std=1.0, dtype="float32", rngs=nnx.Rngs(0))
        one.weight = nnx.Param(jax.device_put(values, NamedSharding(devices.mesh, spec)))
        one.scale = nnx.Param(scale)
        assert kinds(ordered(one, H200)) == {kind}


def test_quantised_activations_refuse_tiles():
    model = ordered(in_fp8(), H200)
    with pytest.raises(ConfigError, match="activations='fp8'"):
        Engine(model, None, replace(CONFIG, activations="fp8"))


IN_COLUMNS = dict(**tiny.ONE_LAYER, hidden_size=128, head_dim=16, intermediate_size=64)
"""Products of 128 rows."""


@pytest.fixture(autouse=True)
def any_cores(monkeypatch):
    monkeypatch.setattr(weight_order, "MOST_CORES", 1000)


def in_columns(*models) -> list:
    copies = [jax.tree.map(jnp.copy, model) for model in models]  # tests share arrays
    tile_columns(*copies)
    return copies


def drafted(target, head) -> tuple:
    engine = one_bucket(Engine(target, head, replace(CONFIG, num_draft=3)))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    done = engine.generate([[3, 5, 7], [9, 4]], params)
    return [one.tokens for one in done], [(one.rounds, one.accepted) for one in done]


def test_only_float32_products_of_whole_tiles_are_in_columns():
    names = lambda model: {
        "/".join(map(str, path[:-1]))
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if path[-1] == "weight" and leaf.get_value().ndim == 3
    }
    layer = ["attention/qkv", "attention/out", "mlp/gate_up", "mlp/down"]
    make = lambda **changes: tiny.target(**IN_COLUMNS | changes)
    (tied,) = in_columns(make(tie_embeddings=True))
    assert names(tied) == {"embed", *(f"layers/0/{name}" for name in layer)}
    assert names(in_columns(make())[0]) == {"lm_head", *(f"layers/0/{name}" for name in layer)}
    assert not names(in_columns(make(dtype="bfloat16"))[0])
    moe = dict(family="qwen3_moe", experts=ExpertsConfig(num_experts=128, top_k=2))
    (mixture,) = in_columns(make(**moe))
    assert mixture.layers[0].mlp.router.weight.ndim == 2  # experts are in one weight of 3 axes
    (head,) = in_columns(tiny.head("selector", selector_rank=128))
    assert head.selector.out.weight.ndim == 2
    assert head.selector.hidden.weight.ndim == 3
    with dispatch.assume(H200):
        assert not names(in_columns(make())[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [True, False])
def test_texts_and_drafts_in_columns_are_those_in_rows(tied):
    sizes = dict(hidden_size=128, target_hidden_size=128, **tiny.HEAD_OF_ONE_LAYER)
    sizes |= dict(own_embedding=not tied, own_lm_head=not tied)
    models = lambda: (
        tiny.target(**IN_COLUMNS, tie_embeddings=tied),
        tiny.head("selector", **sizes),
    )
    assert drafted(*in_columns(*models())) == drafted(*models())


def test_a_row_in_columns_has_the_bits_that_it_has_alone():
    """A round verifies several rows, plain decoding computes one."""
    keys = jax.random.split(jax.random.key(0))
    for N, K in ((960, 576), (128, 1536), (8192, 250), (1152, 896)):
        x, weight = jax.random.normal(keys[0], (9, K)), jax.random.normal(keys[1], (N, K))
        tiles = column_tiles.arrange(weight)
        product = jax.jit(linear)
        alone = jnp.concatenate([product(row[None], tiles) for row in x])
        for count in (2, 4, 9):
            assert (product(x[:count], tiles) == alone[:count]).all()
        capped = jax.jit(lambda x, tiles: 30 * jnp.tanh(linear(x, tiles) / 30))
        assert (capped(x, tiles)[0] == capped(x[:1], tiles)[0]).all()
        np.testing.assert_allclose(alone, x @ weight.T, rtol=1e-3, atol=1e-3)


def test_products_with_the_same_tiles_do_not_copy_them():
    """As of a head that drafts token by token: XLA shared a copy of the weight for each row."""
    tiles = jnp.ones((16, 64, column_tiles.ROWS))

    def drafts(x, tiles):
        for _ in range(3):
            x = jnp.tanh(column_tiles.product(x, tiles)[:, :64])
        return x

    compiled = jax.jit(drafts).lower(jnp.ones((4, 64)), tiles).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tiles.nbytes


def test_a_model_in_columns_is_saved_in_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_order, "MOST_CORES", 1 << 20)
    model = jax.tree.map(jnp.copy, tiny.target(vocab_size=256))
    save_target(model, tmp_path / "rows", dtype="float32")
    tile_columns(model)
    assert weight_order.in_columns(model)
    save_target(model, tmp_path / "tiles", dtype="float32")
    found, wanted = (tmp_path / name / "model.safetensors" for name in ("tiles", "rows"))
    assert found.read_bytes() == wanted.read_bytes()
