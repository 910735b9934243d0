"""Rows in float16: norms store them for products with fp8 tiles, and nothing else does."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.block_gemm import reference as products
from pallas_kernels.device import H200
from pallas_kernels.moe import reference as experts
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.config import ExpertsConfig, GlobalAttention
from peagle_jax.models import cache as paged
from peagle_jax.rope_config import RopeConfig
from tests import tiny
from tests.programs import one_bucket
from tests.test_weight_order import in_fp8, kinds, ordered
from tests.ties import assert_parts_only_at_ties

D, N, H, F, V, E = 256, 4, 128, 384, 640, 4
SIZES = dict(
    num_layers=2,
    vocab_size=V,
    hidden_size=D,
    num_heads=N,
    num_kv_heads=2,
    head_dim=H,
    intermediate_size=F,
)
FAMILIES = {
    "qwen3": dict(family="qwen3"),
    "qwen3_moe": dict(
        family="qwen3_moe",
        experts=ExpertsConfig(num_experts=E, top_k=2, dense_layers=(1,), dense_size=F),
    ),
    "gemma4": dict(
        family="gemma4",
        sliding_windows=(6, None),
        logit_softcap=5.0,
        tie_embeddings=True,
        global_attention=GlobalAttention(
            num_kv_heads=1, head_dim=2 * H, rope=RopeConfig(theta=1e6), shared_kv=True
        ),
    ),
}
"""A layer of each kind: of experts and dense, with a window and without."""
HALF, STREAM = {jnp.dtype(jnp.float16)}, {jnp.dtype(jnp.bfloat16)}
DENSE = {
    "attention": STREAM,
    (8 * H, D): HALF,  # q, k and v
    (D, N * H): STREAM,  # out
    (2 * F, D): HALF,  # gate and up
    (D, F): STREAM,  # down
    (V, D): STREAM,  # lm_head
}
"""Dtypes of the rows that are read, by who reads them: attention, or the shape of a weight."""
READ = {
    "qwen3": DENSE,
    "qwen3_moe": DENSE
    | {(E, D): STREAM, "experts": HALF, ("expert", D, F): STREAM}
    # The reference widens float16 rows.
    | {("expert", F, D): {jnp.dtype(jnp.float32)}},
    "gemma4": DENSE | {(5 * 2 * H, D): HALF, (D, N * 2 * H): STREAM},
}


@pytest.fixture
def read(monkeypatch) -> dict:
    """Dtypes of rows as in `READ`, of the models that run in this test."""
    dtypes = defaultdict(set)

    def spy(module, name, key):
        real = getattr(module, name)

        def record(x, *args, **options):
            dtypes[key(*args)].add(x.dtype)
            return real(x, *args, **options)

        monkeypatch.setattr(module, name, record)

    spy(products, "linear", lambda weight, scale, *_: tuple(formats.logical_shape(weight, scale)))
    spy(experts, "moe", lambda *_: "experts")
    spy(experts, "product", lambda weight, *_: ("expert", *weight.shape))
    spy(paged, "verify_attention", lambda *_: "attention")
    return dtypes


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_store_float16_for_tiles_and_no_other_array_has_it(read, family):
    model = ordered(in_fp8(SIZES | FAMILIES[family], "bfloat16"), H200)
    config = EngineConfig(
        dtype="bfloat16", max_num_seqs=2, max_model_len=64, page_size=4, prefill_chunk=8
    )
    layers = [model.config.attention(i) for i in range(2)]
    B, T, taps = 2, 3, (0, 1, 2)

    def run():
        """A call over the cache, as in serving."""
        tokens = positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        table = jnp.arange(B * 16, dtype=jnp.int32).reshape(B, 16)
        attend = paged.PagedAttention(table, jnp.arange(B, dtype=jnp.int32), positions)
        made = model(tokens, positions, paged.init_cache(layers, config), attend, taps=taps)
        return made, model.unembed(made[0])

    made, logits = jax.eval_shape(run)
    assert {x.dtype for x in jax.tree.leaves(made)} == STREAM  # hidden states, taps and cache
    assert logits.dtype == jnp.float32
    assert read == READ[family]


@pytest.mark.slow
def test_speculation_does_not_change_a_text_of_tiles():
    """16 tokens, so that random drafts are accepted at times."""
    sizes = dict(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=128)
    sizes |= tiny.ONE_LAYER | dict(family="qwen3", vocab_size=16)
    model = ordered(in_fp8(sizes, "bfloat16"), H200)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    for layer in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
        assert kinds(layer) == {"fp8_tiles"}
    sizes = dict(vocab_size=16, draft_vocab_size=16, target_hidden_size=128)
    head = tiny.head(dtype="bfloat16", **tiny.HEAD_OF_ONE_LAYER, **sizes)
    prompts = [np.random.default_rng(n).integers(2, 16, n).tolist() for n in (1, 7, 30)]

    def texts(head, num_draft):
        config = EngineConfig(
            dtype="bfloat16",
            num_draft=num_draft,
            max_num_seqs=4,
            max_model_len=64,
            page_size=4,
            prefill_chunk=16,
            prefill_rows=2,
            max_logprobs=2,
        )
        params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)
        return one_bucket(Engine(model, head, config)).generate(prompts, params)

    plain, speculative = texts(None, 0), texts(head, 3)
    assert sum(done.accepted_per_position[0] for done in speculative) > 0
    assert_parts_only_at_ties(plain, speculative)
