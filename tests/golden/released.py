"""config.json and generation_config.json of released checkpoints, shrunk to eight tiny layers.

Keys and their form are those of the released files, numbers are small; `gpt_oss(...)` and the like
take the keys that differ. Ids of special tokens: 0 pads, 1 begins, 2 ends, 3 and 4 end too.
"""

BOS, PAD, EOS = 1, 0, 2
NUM_LAYERS = 8

GPT_OSS_GENERATION = dict(
    bos_token_id=BOS, do_sample=True, eos_token_id=[EOS, PAD, 3], pad_token_id=PAD
)
QWEN3_GENERATION = dict(
    pad_token_id=PAD, do_sample=True, eos_token_id=[EOS, PAD], repetition_penalty=1.05,
    temperature=0.7, top_p=0.8, top_k=20,
)  # fmt: skip
LLAMA_GENERATION = dict(
    bos_token_id=BOS, do_sample=True, eos_token_id=[EOS, 3, 4], temperature=0.6, top_p=0.9
)
MISTRAL_GENERATION = dict(bos_token_id=BOS, eos_token_id=[EOS, 3])
QWEN2_GENERATION = QWEN3_GENERATION | dict(repetition_penalty=1.1)
GEMMA4_GENERATION = dict(
    bos_token_id=2, do_sample=True, eos_token_id=[1, 3, 4], pad_token_id=PAD, temperature=1.0,
    top_k=64, top_p=0.95,
)  # fmt: skip

MXFP4 = dict(
    modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    quant_method="mxfp4",
)  # fmt: skip
_CHANNEL = dict(
    actorder=None, block_structure=None, group_size=None, num_bits=8, observer_kwargs={},
    symmetric=True, type="float",
)  # fmt: skip
CHANNEL_FP8 = dict(
    config_groups=dict(group_0=dict(input_activations=_CHANNEL | dict(dynamic=True, observer=None,
    strategy="token"), output_activations=None, targets=["Linear"],
    weights=_CHANNEL | dict(dynamic=False, observer="minmax", strategy="channel")) ),
    format="float-quantized", global_compression_ratio=None, ignore=["lm_head"],
    kv_cache_scheme=None, quant_method="compressed-tensors", quantization_status="compressed",
)  # fmt: skip
TENSOR_FP8 = dict(activation_scheme="static", ignored_layers=["lm_head"], quant_method="fp8")


def block_fp8(num_layers: int) -> dict:
    """The `quantization_config` of a Qwen3-MoE file with 128-blocks."""
    layers = [f"model.layers.{i}" for i in range(num_layers)]
    norms = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    return dict(
        activation_scheme="dynamic",
        fmt="e4m3",
        modules_to_not_convert=["lm_head", *(f"{x}.{norm}" for x in layers for norm in norms)],
        quant_method="fp8",
        weight_block_size=[128, 128],
    )


def gpt_oss(**changes) -> dict:
    """gpt-oss; with 4 x 8 = 32 or 8 x 16 = 128 query channels against a width of 64."""
    return dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=EOS, experts_per_token=4, head_dim=16, hidden_act="silu", hidden_size=64,
        initial_context_length=128, initializer_range=0.02, intermediate_size=32,
        layer_types=["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
        max_position_embeddings=4096, model_type="gpt_oss", num_attention_heads=8,
        num_experts_per_tok=4, num_hidden_layers=NUM_LAYERS, num_key_value_heads=2,
        num_local_experts=8, output_router_logits=False, pad_token_id=PAD, rms_norm_eps=1e-5,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0,
        original_max_position_embeddings=128, rope_type="yarn", truncate=False), rope_theta=150000,
        router_aux_loss_coef=0.9, sliding_window=8, swiglu_limit=7.0, tie_word_embeddings=False,
        use_cache=True, vocab_size=256,
    ) | changes  # fmt: skip


def _qwen3(**fields) -> dict:
    """What dense and MoE Qwen3 files share."""
    return dict(
        attention_dropout=0.0, eos_token_id=EOS, head_dim=16, hidden_act="silu", hidden_size=64,
        initializer_range=0.02, max_position_embeddings=512, num_attention_heads=8,
        num_hidden_layers=NUM_LAYERS, num_key_value_heads=2, rms_norm_eps=1e-6, rope_scaling=None,
        sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True,
        use_sliding_window=False, vocab_size=256,
    ) | fields  # fmt: skip


def qwen3_moe(**changes) -> dict:
    """Qwen3-Coder. `intermediate_size` belongs to dense layers, which released ones lack."""
    return _qwen3(
        architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, intermediate_size=40,
        max_window_layers=NUM_LAYERS // 2, mlp_only_layers=[], model_type="qwen3_moe",
        moe_intermediate_size=8, norm_topk_prob=True, num_experts=8, num_experts_per_tok=4,
        output_router_logits=False, qkv_bias=False, rope_theta=10000000, router_aux_loss_coef=0.0,
        shared_expert_intermediate_size=0, use_qk_norm=True,
    ) | changes  # fmt: skip


def qwen3(**changes) -> dict:
    """Dense Qwen3."""
    return _qwen3(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=PAD,
        intermediate_size=32, max_window_layers=NUM_LAYERS, model_type="qwen3",
        num_attention_heads=6, rope_theta=1000000,
    ) | changes  # fmt: skip


def llama(**changes) -> dict:
    """Llama 3.1 instruct, several end-of-sequence ids in the config itself."""
    return dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
        bos_token_id=BOS, eos_token_id=[EOS, 3, 4], hidden_act="silu", hidden_size=64,
        initializer_range=0.02, intermediate_size=32, max_position_embeddings=512, mlp_bias=False,
        model_type="llama", num_attention_heads=4, num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=2, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=dict(factor=8.0,
        high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64,
        rope_type="llama3"), rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_cache=True, vocab_size=256,
    ) | changes  # fmt: skip


def mistral(**changes) -> dict:
    """Mistral v0.1: all layers slide."""
    return dict(
        architectures=["MistralForCausalLM"], bos_token_id=BOS, eos_token_id=EOS, hidden_act="silu",
        hidden_size=32, initializer_range=0.02, intermediate_size=24, max_position_embeddings=96,
        model_type="mistral", num_attention_heads=4, num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=8,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=256,
    ) | changes  # fmt: skip


def qwen2(**changes) -> dict:
    """Qwen2.5, with the window of its last three layers switched on."""
    return dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=PAD,
        eos_token_id=EOS, hidden_act="silu", hidden_size=32, initializer_range=0.02,
        intermediate_size=24, max_position_embeddings=512, max_window_layers=NUM_LAYERS - 3,
        model_type="qwen2", num_attention_heads=4, num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=8,
        tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True, use_sliding_window=True,
        vocab_size=256,
    ) | changes  # fmt: skip


def gemma4() -> dict:
    """Gemma 4 31B: the wrapper with its text config and a vision tower of one layer.

    The ids of images and sounds lie outside the vocabulary: transformers embeds them as padding.
    """
    text = dict(
        attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True, bos_token_id=2,
        dtype="bfloat16", enable_moe_block=False, eos_token_id=1, final_logit_softcapping=5.0,
        global_head_dim=32, head_dim=16, hidden_activation="gelu_pytorch_tanh", hidden_size=64,
        hidden_size_per_layer_input=0, initializer_range=0.02, intermediate_size=32,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        max_position_embeddings=512, model_type="gemma4_text", moe_intermediate_size=None,
        num_attention_heads=4, num_experts=None, num_global_key_value_heads=1,
        num_hidden_layers=NUM_LAYERS, num_key_value_heads=2, num_kv_shared_layers=0,
        pad_token_id=PAD, rms_norm_eps=1e-6,
        rope_parameters=dict(full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0,
        rope_type="proportional" ), sliding_attention=dict(rope_theta=10000.0,
        rope_type="default")), sliding_window=8, tie_word_embeddings=True, top_k_experts=None,
        use_bidirectional_attention="vision", use_cache=True, use_double_wide_mlp=False,
        vocab_size=256, vocab_size_per_layer_input=256,
    )  # fmt: skip
    vision = dict(
        attention_bias=False, attention_dropout=0.0, dtype="bfloat16", head_dim=4,
        hidden_activation="gelu_pytorch_tanh", hidden_size=8, intermediate_size=8,
        max_position_embeddings=64, model_type="gemma4_vision", num_attention_heads=2,
        num_hidden_layers=1, num_key_value_heads=2, patch_size=2, pooling_kernel_size=3,
        position_embedding_size=4, rms_norm_eps=1e-6, rope_parameters=dict(
            rope_theta=100.0, rope_type="default"
        ),
        standardize=True, use_clipped_linears=False,
    )  # fmt: skip
    return dict(
        architectures=["Gemma4ForConditionalGeneration"], audio_config=None, audio_token_id=260,
        boa_token_id=258, boi_token_id=257, dtype="bfloat16", eoa_token_index=262, eoi_token_id=261,
        eos_token_id=[1, 3], image_token_id=259, initializer_range=0.02, model_type="gemma4",
        text_config=text, tie_word_embeddings=True, video_token_id=263, vision_config=vision,
    )  # fmt: skip
