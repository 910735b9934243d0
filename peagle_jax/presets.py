"""`PRESETS`: the real models by name, each value as in the released `config.json`."""

from peagle_jax.config import (
    ExpertsConfig,
    GlobalAttention,
    TargetConfig,
)
from peagle_jax.rope_config import Llama3Scaling, RopeConfig, YarnScaling


def _llama(*, rope_factor: float, **fields) -> TargetConfig:
    base = dict(
        family="llama", vocab_size=128256, num_kv_heads=8, norm_eps=1e-5, max_position=131072,
        attention_bias=False, qk_norm=False, eos_ids=(128001, 128008, 128009), bos_id=128000,
        rope=RopeConfig(theta=5e5, scaling=Llama3Scaling(factor=rope_factor)),
    )  # fmt: skip
    return TargetConfig(**(base | fields))


def _mistral(**fields) -> TargetConfig:
    base = dict(
        family="mistral", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=14336, norm_eps=1e-5, max_position=32768,
        tie_embeddings=False, attention_bias=False, qk_norm=False, eos_ids=(2,), bos_id=1,
    )  # fmt: skip
    return TargetConfig(**(base | fields))


def _qwen2(**fields) -> TargetConfig:
    """Qwen2.5 Instruct; Qwen2.5-Coder has the same sizes (arXiv 2409.12186, table 1)."""
    base = dict(
        family="qwen2", norm_eps=1e-6, rope=RopeConfig(theta=1e6), max_position=32768,
        attention_bias=True, qk_norm=False, eos_ids=(151645, 151643),
    )  # fmt: skip
    return TargetConfig(**(base | fields))


def _qwen3(**fields) -> TargetConfig:
    base = dict(
        family="qwen3", vocab_size=151936, num_kv_heads=8, head_dim=128, norm_eps=1e-6,
        rope=RopeConfig(theta=1e6), max_position=40960, attention_bias=False, qk_norm=True,
        eos_ids=(151645, 151643),
    )  # fmt: skip
    return TargetConfig(**(base | fields))


def _gpt_oss(*, num_layers: int, num_experts: int) -> TargetConfig:
    return TargetConfig(
        family="gpt_oss", vocab_size=201088, hidden_size=2880, num_layers=num_layers,
        num_heads=64, num_kv_heads=8, head_dim=64, intermediate_size=2880, norm_eps=1e-5,
        rope=RopeConfig(theta=150000.0, scaling=YarnScaling(factor=32.0, truncate=False)),
        max_position=131072, tie_embeddings=False, attention_bias=True, qk_norm=False,
        sliding_windows=(128, None) * (num_layers // 2),
        experts=ExpertsConfig(num_experts=num_experts, top_k=4), swiglu_limit=7.0,
        eos_ids=(200002, 199999, 200012), bos_id=199998,
    )  # fmt: skip


_QWEN3_CODER_30B = TargetConfig(
    family="qwen3_moe", vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32,
    num_kv_heads=4, head_dim=128, intermediate_size=768, norm_eps=1e-6,
    rope=RopeConfig(theta=1e7), max_position=262144, tie_embeddings=False,
    attention_bias=False, qk_norm=True, experts=ExpertsConfig(num_experts=128, top_k=8),
    eos_ids=(151645, 151643),
)  # fmt: skip

_GEMMA_4_31B = TargetConfig(
    family="gemma4", vocab_size=262144, hidden_size=5376, num_layers=60, num_heads=32,
    num_kv_heads=16, head_dim=256, intermediate_size=21504, norm_eps=1e-6,
    rope=RopeConfig(theta=1e4), max_position=262144, tie_embeddings=True,
    attention_bias=False, qk_norm=True, sliding_windows=(1024, 1024, 1024, 1024, 1024, None) * 10,
    global_attention=GlobalAttention(
        num_kv_heads=4, head_dim=512, rope=RopeConfig(theta=1e6, rotary_share=0.25), shared_kv=True
    ),
    logit_softcap=30.0, eos_ids=(1, 106, 50), bos_id=2,
)  # fmt: skip

# fmt: off
PRESETS: dict[str, TargetConfig] = {
    "llama-3.2-1b": _llama(num_layers=16, hidden_size=2048, num_heads=32, head_dim=64, intermediate_size=8192, tie_embeddings=True, rope_factor=32),
    "llama-3.2-3b": _llama(num_layers=28, hidden_size=3072, num_heads=24, head_dim=128, intermediate_size=8192, tie_embeddings=True, rope_factor=32),
    "llama-3.1-8b": _llama(num_layers=32, hidden_size=4096, num_heads=32, head_dim=128, intermediate_size=14336, tie_embeddings=False, rope_factor=8),
    "llama-3.3-70b": _llama(num_layers=80, hidden_size=8192, num_heads=64, head_dim=128, intermediate_size=28672, tie_embeddings=False, rope_factor=8),
    "mistral-7b-v0.1": _mistral(vocab_size=32000, rope=RopeConfig(theta=1e4), sliding_windows=(4096,) * 32),
    "mistral-7b-v0.3": _mistral(vocab_size=32768, rope=RopeConfig(theta=1e6)),
    "qwen2.5-0.5b": _qwen2(vocab_size=151936, num_layers=24, hidden_size=896, num_heads=14, num_kv_heads=2, head_dim=64, intermediate_size=4864, tie_embeddings=True),
    "qwen2.5-1.5b": _qwen2(vocab_size=151936, num_layers=28, hidden_size=1536, num_heads=12, num_kv_heads=2, head_dim=128, intermediate_size=8960, tie_embeddings=True),
    "qwen2.5-3b": _qwen2(vocab_size=151936, num_layers=36, hidden_size=2048, num_heads=16, num_kv_heads=2, head_dim=128, intermediate_size=11008, tie_embeddings=True),
    "qwen2.5-7b": _qwen2(vocab_size=152064, num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128, intermediate_size=18944, tie_embeddings=False),
    "qwen2.5-14b": _qwen2(vocab_size=152064, num_layers=48, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=13824, tie_embeddings=False),
    "qwen2.5-32b": _qwen2(vocab_size=152064, num_layers=64, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=27648, tie_embeddings=False),
    "qwen3-0.6b": _qwen3(num_layers=28, hidden_size=1024, num_heads=16, intermediate_size=3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(num_layers=28, hidden_size=2048, num_heads=16, intermediate_size=6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(num_layers=36, hidden_size=2560, num_heads=32, intermediate_size=9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(num_layers=36, hidden_size=4096, num_heads=32, intermediate_size=12288, tie_embeddings=False),
    "qwen3-14b": _qwen3(num_layers=40, hidden_size=5120, num_heads=40, intermediate_size=17408, tie_embeddings=False),
    "qwen3-32b": _qwen3(num_layers=64, hidden_size=5120, num_heads=64, intermediate_size=25600, tie_embeddings=False),
    "qwen3-coder-30b-a3b": _QWEN3_CODER_30B,
    "gpt-oss-20b": _gpt_oss(num_layers=24, num_experts=32),
    "gpt-oss-120b": _gpt_oss(num_layers=36, num_experts=128),
    "gemma-4-31b": _GEMMA_4_31B,
}
# fmt: on
