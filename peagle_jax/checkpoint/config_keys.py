"""Keys of a target's `config.json`: one table per `model_type` with default, kind and accepted
values.

A missing key has the default of transformers' configuration class of the same `model_type`
(`tests/checkpoint/test_config_keys.py` compares the tables with these classes). null means the
same, except for keys that are `nullable`. A stated value outside of `accepted` is refused by name.

Keys without a row change nothing: `stray_keys` lists those that no table knows. A new family adds a
table to `KEYS`; a key of another family that would change the result has a row in `UNSUPPORTED`.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from peagle_jax.checkpoint.fields import Fields

MAX_LAYERS = 4096
MAX_EXPERTS = 4096
SWIGLU_ALPHA = 1.702


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of config.json.

    Args:
      kind: "count" is a whole number from `least` to `most`, "number" a finite one, above zero if
        `positive`; "value" is any JSON value, to be compared with `accepted`.
      default: what transformers takes where the key is missing.
      accepted: supported values; empty means every value of the kind.
      nullable: null is a value of its own (None), not the default.
    """

    kind: Literal["count", "number", "flag", "list", "object", "value"]
    default: object
    accepted: tuple = ()
    nullable: bool = False
    least: int = 1
    most: int = 2**31
    positive: bool = False

    def read(self, fields: Fields, name: str):
        """Reads key `name` of config.json, or its default.

        Raises:
          CheckpointError: a value of the wrong kind, out of bounds, or not supported.
        """
        if fields.raw.get(name) is None:
            value = None if self.nullable and name in fields.raw else self.default
            missing = True
        else:
            value, missing = self._stated(fields, name), False
        if self.accepted and not any(_same(value, accepted) for accepted in self.accepted):
            stated = f"{name} {value!r}"
            if missing:
                stated = f"{name} is missing and its default {value!r}"
            known = " or ".join("leaving it out" if x is None else repr(x) for x in self.accepted)
            raise fields.error(f"{stated} is not supported, {known} is")
        return value

    def _stated(self, fields: Fields, name: str):
        match self.kind:
            case "count":
                return fields.count(name, least=self.least, most=self.most)
            case "number":
                return fields.number(name, positive=self.positive)
            case "flag":
                return fields.flag(name, None)
            case "list":
                return fields.items(name)
            case "object":
                return fields.inner(name).raw
        return fields.get(name)


def _same(value, other) -> bool:
    """Equality in which true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def count(default: int | None, **bounds) -> Key:
    return Key(kind="count", default=default, **bounds)


def positive(default: float | None, **bounds) -> Key:
    return Key(kind="number", default=default, positive=True, **bounds)


def flag(default: bool, *accepted: bool) -> Key:
    return Key(kind="flag", default=default, accepted=accepted)


def only(*accepted, default=None) -> Key:
    """A key of which only some values are supported; the first is the default unless one is
    given."""
    default = accepted[0] if default is None else default
    return Key(kind="value", default=default, accepted=accepted)


LAYER_TYPES = Key(kind="list", default=None)
"""Missing: each family has its own rule."""

_SHARED = {
    "vocab_size": count(32000),
    "hidden_size": count(4096),
    "intermediate_size": count(11008),
    "num_hidden_layers": count(32, most=MAX_LAYERS),
    "num_attention_heads": count(32),
    "num_key_value_heads": count(None),  # None: as many as query heads
    "head_dim": count(None),  # None: hidden_size / num_attention_heads
    "max_position_embeddings": count(2048),
    "rms_norm_eps": positive(1e-6),
    "attention_bias": flag(False),
    "tie_word_embeddings": flag(False),
    "hidden_act": only("silu"),
}
"""Keys of every family, with Llama's defaults."""


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Keys that every file states; a message names those that one leaves out."""


def _table(base: Mapping[str, Key], defaults: Mapping[str, object], **rows: Key) -> dict[str, Key]:
    """`base` with other defaults, and with `rows` added or replaced."""
    changed = {name: replace(base[name], default=value) for name, value in defaults.items()}
    return {**base, **changed, **rows}


_NO_WINDOWS = {
    "use_sliding_window": flag(False, False),
    "layer_types": LAYER_TYPES,  # checked where they are read
}
_EXPERTS = {
    "num_experts_per_tok": count(4, most=MAX_EXPERTS),
    "num_experts": count(None, most=MAX_EXPERTS),
    "num_local_experts": count(None, most=MAX_EXPERTS),
}
"""Both names of the number of experts are in use; transformers 5 writes the second one."""

_MISTRAL = dict(
    vocab_size=32000, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072
)
_QWEN2 = dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
)
_QWEN3 = dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
)
_QWEN3_MOE = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)
_GPT_OSS = dict(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    attention_bias=True,
)
_GEMMA4 = dict(
    vocab_size=262144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
_HEADS_OR_NONE = count(None, nullable=True)
_QWEN_WINDOWS = {
    "use_sliding_window": flag(False),
    "sliding_window": count(4096, nullable=True),
    "max_window_layers": count(28, least=0),
    "layer_types": LAYER_TYPES,
}

KEYS: dict[str, dict[str, Key]] = {
    "llama": _table(_SHARED, {}, mlp_bias=flag(False), **_NO_WINDOWS),
    "mistral": _table(
        _SHARED,
        _MISTRAL,
        attention_bias=flag(False, False),
        sliding_window=count(4096, nullable=True),
        layer_types=LAYER_TYPES,
    ),
    "qwen2": _table(
        _SHARED | {"num_key_value_heads": _HEADS_OR_NONE},
        _QWEN2,
        attention_bias=Key(kind="flag", default=None),  # says nothing: q, k and v always have some
        **_QWEN_WINDOWS,
    ),
    "qwen3": _table(
        _SHARED | {"num_key_value_heads": _HEADS_OR_NONE},
        _QWEN3,
        use_qk_norm=flag(True, True),
        **_QWEN_WINDOWS,
    ),
    "qwen3_moe": _table(
        _SHARED | _EXPERTS,
        _QWEN3_MOE | {"num_experts_per_tok": 8, "num_experts": 128},
        moe_intermediate_size=count(768),
        norm_topk_prob=flag(False),
        decoder_sparse_step=count(1),
        mlp_only_layers=Key(kind="list", default=[]),
        use_qk_norm=flag(True, True),
        **_NO_WINDOWS,
    ),
    "gpt_oss": _table(
        _SHARED | _EXPERTS | {"num_key_value_heads": _HEADS_OR_NONE, "head_dim": _HEADS_OR_NONE},
        _GPT_OSS | {"num_experts_per_tok": 4, "num_local_experts": 128},
        sliding_window=count(128, nullable=True),
        layer_types=LAYER_TYPES,
        swiglu_limit=positive(7.0),
        swiglu_alpha=only(SWIGLU_ALPHA),
    ),
    "gemma4_text": _table(
        {name: key for name, key in _SHARED.items() if name != "hidden_act"},
        _GEMMA4,
        hidden_activation=only("gelu_pytorch_tanh"),
        sliding_window=count(512),
        layer_types=LAYER_TYPES,
        final_logit_softcapping=positive(None),
        use_bidirectional_attention=only(None, "vision"),
        attention_k_eq_v=flag(False),
        global_head_dim=count(512),
        num_global_key_value_heads=count(None),
        per_layer_config=Key(kind="object", default=None),
        hidden_size_per_layer_input=only(0, default=256),
        num_kv_shared_layers=only(0),
        enable_moe_block=only(False),
        use_double_wide_mlp=only(False),
    ),
}
"""By `model_type`: the keys that decide a model's result, rope's and token ids apart."""

HEAD_KEYS: dict[str, dict[str, Key]] = {
    "llama": KEYS["llama"]
    | {
        "use_sliding_window": flag(False),
        "sliding_window": count(None),
        "use_qk_norm": flag(False),  # of the target, whose keys a flat file may have
        "logit_scale": positive(1.0),
    },
    "qwen3": KEYS["qwen3"] | {"logit_scale": positive(1.0)},
}
"""Keys of a head's layers, by the class that they are made of."""

UNSUPPORTED = {
    "is_causal": only(True),
    "is_encoder_decoder": only(False),
    "add_cross_attention": only(False),
    "use_qk_norm": only(None, False),
    "qkv_bias": only(None, False),
    "alibi": only(False),
    "clip_qkv": only(None),
    "no_rope_layers": only(None, []),
    "attention_chunk_size": only(None),
    "residual_multiplier": only(None, 1.0),
    "embedding_multiplier": only(None, 1.0),
    "attention_multiplier": only(None),
    "logits_scaling": only(None, 1.0),
    "logit_scale": only(None, 1.0),
    "query_pre_attn_scalar": only(None),
    "attn_logit_softcapping": only(None),
    "final_logit_softcapping": only(None),
    "use_bidirectional_attention": only(None, False),
    "num_kv_shared_layers": only(None, 0),
    "shared_expert_intermediate_size": only(None, 0),
    "n_shared_experts": only(None, 0),
    "first_k_dense_replace": only(None, 0),
    "routed_scaling_factor": only(None, 1.0),
}
"""Keys of other families: a file that states one of them with another value means another model."""

ROPE_KEYS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
"""Read in `rope_json`."""

IGNORED = ROPE_KEYS | {
    "model_type",
    "architectures",
    "auto_map",
    "quantization_config",
    "text_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "initializer_range",
    "attention_dropout",
    "pretraining_tp",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "name_or_path",
    "tie_last_hidden_states",
    # of one family or the other
    "max_window_layers",
    "sliding_window",
    "router_aux_loss_coef",
    "output_router_logits",
    "experts_per_token",
    "initial_context_length",
    "moe_intermediate_size",
    "num_experts",
    "top_k_experts",
    "vocab_size_per_layer_input",
    # of Gemma 4's wrapper: other towers and their tokens
    "vision_config",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_index",
    "audio_token_id",
}
"""Keys that are read elsewhere, or that say nothing about the result."""


def check_unsupported(fields: Fields, known: Container[str]) -> None:
    """Refuses keys of other families that would change the result, `known` ones apart.

    Raises:
      CheckpointError: names the key and its value.
    """
    for name, key in UNSUPPORTED.items():
        if name not in known:
            key.read(fields, name)


def read_keys(fields: Fields, table: Mapping[str, Key]) -> dict[str, object]:
    """Value of every key of a family's table.

    Raises:
      CheckpointError: names a key with a value that cannot be right or is not supported.
    """
    check_unsupported(fields, table)
    return {name: key.read(fields, name) for name, key in table.items()}


def stray_keys(raw: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """Keys that neither `known` nor this file has: they change nothing. Sorted."""
    known = {*known, *UNSUPPORTED, *IGNORED}
    return sorted(key for key in raw if key not in known and not key.startswith("_"))
