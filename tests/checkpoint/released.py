"""Released checkpoints without their weights: config.json, generation_config.json, tensor headers.

Names, shapes and values are those of the published files; keys that say nothing about the forward
pass are left out. Written from the files, not from the tables under test.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.safetensors import TensorInfo

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
Headers = dict[str, TensorInfo]

LLAMA3_EOS = [128001, 128008, 128009]
LLAMA3_ROPE = dict(
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
    rope_type="llama3",
)
MISTRAL_GENERATION = dict(bos_token_id=1, eos_token_id=2)
QWEN2_GENERATION = dict(
    bos_token_id=151643, eos_token_id=[151645, 151643], pad_token_id=151643, repetition_penalty=1.1
)
QWEN3_GENERATION = dict(bos_token_id=151643, eos_token_id=[151645, 151643], pad_token_id=151643)
GPT_OSS_GENERATION = dict(
    bos_token_id=199998, eos_token_id=[200002, 199999, 200012], pad_token_id=199999
)


def _llama(*, factor: float, **fields) -> dict:
    common = dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=128000,
        eos_token_id=LLAMA3_EOS, hidden_act="silu", max_position_embeddings=131072, mlp_bias=False,
        model_type="llama", num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
        rope_scaling=LLAMA3_ROPE | dict(factor=factor), rope_theta=500000.0,
        tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=128256,
    )  # fmt: skip
    return common | fields


def _mistral(**fields) -> dict:
    common = dict(
        architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu",
        hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
        model_type="mistral", num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
        rms_norm_eps=1e-05, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True,
    )  # fmt: skip
    return common | fields


def _qwen2(**fields) -> dict:
    common = dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
        eos_token_id=151645, hidden_act="silu", max_position_embeddings=32768, model_type="qwen2",
        rms_norm_eps=1e-06, rope_theta=1000000.0, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_cache=True, use_sliding_window=False, vocab_size=152064,
    )  # fmt: skip
    return common | fields


def _qwen3(**fields) -> dict:
    common = dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=151643,
        eos_token_id=151645, head_dim=128, hidden_act="silu", max_position_embeddings=40960,
        max_window_layers=fields["num_hidden_layers"], model_type="qwen3", num_key_value_heads=8,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False,
        vocab_size=151936,
    )  # fmt: skip
    return common | fields


def _gpt_oss(layers: int, experts: int) -> dict:
    return dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880,
        initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        max_position_embeddings=131072, model_type="gpt_oss", num_attention_heads=64,
        num_experts_per_tok=4, num_hidden_layers=layers, num_key_value_heads=8,
        num_local_experts=experts, pad_token_id=199999,
        quantization_config=dict(modules_to_not_convert=["model.layers.*.self_attn",
        "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], quant_method="mxfp4"),
        rms_norm_eps=1e-05, rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0,
        original_max_position_embeddings=4096, rope_type="yarn", truncate=False), rope_theta=150000,
        router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
        vocab_size=201088,
    )  # fmt: skip


QWEN3_CODER = dict(
    architectures=["Qwen3MoeForCausalLM"], attention_bias=False, decoder_sparse_step=1,
    eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=5472,
    max_position_embeddings=262144, max_window_layers=28, mlp_only_layers=[],
    model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32,
    num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
    qkv_bias=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000,
    shared_expert_intermediate_size=0, sliding_window=None, tie_word_embeddings=False,
    torch_dtype="bfloat16", use_qk_norm=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip

GEMMA_4_31B = dict(
    architectures=["Gemma4ForConditionalGeneration"], audio_config=None, dtype="bfloat16",
    eos_token_id=[1, 106], model_type="gemma4", tie_word_embeddings=True,
    text_config=dict(attention_bias=False, attention_k_eq_v=True, bos_token_id=2, dtype="bfloat16",
    enable_moe_block=False, eos_token_id=1, final_logit_softcapping=30.0, global_head_dim=512,
    head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376,
    hidden_size_per_layer_input=0, intermediate_size=21504,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10,
    max_position_embeddings=262144, model_type="gemma4_text", moe_intermediate_size=None,
    num_attention_heads=32, num_experts=None, num_global_key_value_heads=4, num_hidden_layers=60,
    num_key_value_heads=16, num_kv_shared_layers=0, pad_token_id=0, rms_norm_eps=1e-06,
    rope_parameters=dict(full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0,
    rope_type="proportional" ), sliding_attention=dict(rope_theta=10000.0, rope_type="default")),
    sliding_window=1024, tie_word_embeddings=True, top_k_experts=None,
    use_bidirectional_attention="vision", use_double_wide_mlp=False, vocab_size=262144),
    vision_config=dict(model_type="gemma4_vision", hidden_size=1152, num_hidden_layers=27),
)  # fmt: skip

# fmt: off
CONFIGS: dict[str, tuple[dict, dict]] = {
    "llama-3.2-1b": (_llama(hidden_size=2048, head_dim=64, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=16, tie_word_embeddings=True, factor=32.0), {}),
    "llama-3.2-3b": (_llama(hidden_size=3072, head_dim=128, intermediate_size=8192, num_attention_heads=24, num_hidden_layers=28, tie_word_embeddings=True, factor=32.0), {}),
    "llama-3.1-8b": (_llama(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=32, factor=8.0), {}),
    "llama-3.3-70b": (_llama(hidden_size=8192, head_dim=128, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=80, factor=8.0), {}),
    "mistral-7b-v0.1": (_mistral(rope_theta=10000.0, sliding_window=4096, vocab_size=32000), MISTRAL_GENERATION),
    "mistral-7b-v0.3": (_mistral(rope_theta=1000000.0, sliding_window=None, vocab_size=32768), MISTRAL_GENERATION),
    "qwen2.5-0.5b": (_qwen2(hidden_size=896, intermediate_size=4864, max_window_layers=21, num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, sliding_window=32768, tie_word_embeddings=True, vocab_size=151936), QWEN2_GENERATION),
    "qwen2.5-1.5b": (_qwen2(hidden_size=1536, intermediate_size=8960, max_window_layers=21, num_attention_heads=12, num_hidden_layers=28, num_key_value_heads=2, sliding_window=32768, tie_word_embeddings=True, vocab_size=151936), QWEN2_GENERATION),
    "qwen2.5-3b": (_qwen2(hidden_size=2048, intermediate_size=11008, max_window_layers=70, num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=2, sliding_window=32768, tie_word_embeddings=True, vocab_size=151936), QWEN2_GENERATION),
    "qwen2.5-7b": (_qwen2(hidden_size=3584, intermediate_size=18944, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, sliding_window=131072), QWEN2_GENERATION),
    "qwen2.5-14b": (_qwen2(hidden_size=5120, intermediate_size=13824, max_window_layers=70, num_attention_heads=40, num_hidden_layers=48, num_key_value_heads=8, sliding_window=131072), QWEN2_GENERATION),
    "qwen2.5-32b": (_qwen2(hidden_size=5120, intermediate_size=27648, max_window_layers=70, num_attention_heads=40, num_hidden_layers=64, num_key_value_heads=8, sliding_window=131072), QWEN2_GENERATION),
    "qwen3-0.6b": (_qwen3(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_hidden_layers=28, tie_word_embeddings=True), QWEN3_GENERATION),
    "qwen3-1.7b": (_qwen3(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_hidden_layers=28, tie_word_embeddings=True), QWEN3_GENERATION),
    "qwen3-4b": (_qwen3(hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_hidden_layers=36, tie_word_embeddings=True), QWEN3_GENERATION),
    "qwen3-8b": (_qwen3(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_hidden_layers=36), QWEN3_GENERATION),
    "qwen3-14b": (_qwen3(hidden_size=5120, intermediate_size=17408, num_attention_heads=40, num_hidden_layers=40), QWEN3_GENERATION),
    "qwen3-32b": (_qwen3(hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_hidden_layers=64), QWEN3_GENERATION),
    "qwen3-coder-30b-a3b": (QWEN3_CODER, dict(eos_token_id=[151645, 151643], pad_token_id=151643)),
    "gpt-oss-20b": (_gpt_oss(24, 32), GPT_OSS_GENERATION),
    "gpt-oss-120b": (_gpt_oss(36, 128), GPT_OSS_GENERATION),
    "gemma-4-31b": (GEMMA_4_31B, dict(bos_token_id=2, eos_token_id=[1, 106, 50], pad_token_id=0)),
}
# fmt: on


def write_config(folder: Path, config: dict, generation: dict | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _headers(shapes: dict[str, tuple], dtype: np.dtype = BF16) -> Headers:
    return {name: TensorInfo(name, dtype, shape, 0, 0) for name, shape in shapes.items()}


AWS_GPT_OSS_20B_HEAD = dict(
    architectures=["LlamaForCausalLM"], draft_vocab_size=201088, head_dim=64, hidden_act="silu",
    hidden_size=2880, intermediate_size=14336, max_position_embeddings=131072, model_type="llama",
    num_attention_heads=64, num_hidden_layers=4, num_key_value_heads=8, ptd_token_id=201020,
    rms_norm_eps=1e-05, rope_scaling=LLAMA3_ROPE | dict(factor=8.0), rope_theta=500000.0,
    tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=201088,
)  # fmt: skip
"""amazon/GPT-OSS-20B-P-EAGLE, as far as other loaders show it."""


def aws_gpt_oss_20b_head() -> Headers:
    shapes = {
        "embed_tokens.weight": (201088, 2880),
        "fc.weight": (2880, 8640),
        "mask_hidden": (1, 1, 8640),
        "midlayer.hidden_norm.weight": (2880,),
        "norm.weight": (2880,),
        "lm_head.weight": (201088, 2880),
    }
    for layer, width in (("midlayer", 5760), *((f"layers.{i}", 2880) for i in (1, 2, 3))):
        shapes |= {
            f"{layer}.input_layernorm.weight": (2880,),
            f"{layer}.mlp.down_proj.weight": (2880, 14336),
            f"{layer}.mlp.gate_proj.weight": (14336, 2880),
            f"{layer}.mlp.up_proj.weight": (14336, 2880),
            f"{layer}.post_attention_layernorm.weight": (2880,),
            f"{layer}.self_attn.k_proj.weight": (512, width),
            f"{layer}.self_attn.o_proj.weight": (2880, 4096),
            f"{layer}.self_attn.q_proj.weight": (4096, width),
            f"{layer}.self_attn.v_proj.weight": (512, width),
        }
    maps = _headers({"d2t": (201088,)}, np.dtype(np.int64))
    return _headers(shapes) | maps | _headers({"t2d": (201088,)}, np.dtype(bool))
