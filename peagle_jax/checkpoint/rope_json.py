"""Rotary embeddings in `config.json` <-> `RopeConfig`, and the sliding windows of layers.

Released files have `rope_theta` and `rope_scaling`, those of transformers 5 `rope_parameters`;
Gemma 4 has one such object for each type of layer.
"""

import math

from peagle_jax.checkpoint.fields import Fields
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

SLIDING, FULL = "sliding_attention", "full_attention"


DEFAULT_ROPE = RopeConfig(theta=1e4)
GPT_OSS_ROPE = RopeConfig(
    theta=1.5e5,
    scaling=YarnScaling(factor=32.0, original_max_position=4096, truncate=False),
)
"""Defaults of transformers where a file states no rope (`RotaryEmbeddingConfigMixin`,
`GptOssConfig`)."""

_OBJECTS = ("rope_scaling", "rope_parameters")
_INNER_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "alpha",
}


def rope_config(
    fields: Fields, *, max_position: int, default: RopeConfig = DEFAULT_ROPE
) -> RopeConfig:
    """The rope that all layers share.

    Args:
      max_position: `original_max_position_embeddings` where scaling needs it and does not state it.
      default: of files that state none; its theta is the default of those that state scaling alone.
    Raises:
      CheckpointError: unknown kind of scaling, an incomplete one, or two statements that contradict
        each other.
    """
    outer = {"original_max_position_embeddings": max_position}
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        if fields.get(key) is not None:
            outer[key] = fields.get(key)
    stated = {}
    for key in _OBJECTS:
        scaling = fields.inner(key, {})
        if scaling.raw:
            stated[key] = _rope(_merged(scaling, fields, outer | {"rope_theta": default.theta}))
    if len(set(stated.values())) > 1:
        raise fields.error(
            "rope_scaling and rope_parameters contradict each other; leave one of them out"
        )
    if stated:
        return next(iter(stated.values()))
    theta = fields.number("rope_theta", default.theta, positive=True, above=1)
    fields.only("partial_rotary_factor", 1.0)
    kept = default.scaling if fields.get("rope_parameters") is None else None  # {} means no scaling
    return RopeConfig(theta=theta, scaling=kept)


def _merged(scaling: Fields, fields: Fields, outer: dict) -> Fields:
    """Merges the object `scaling` with the same keys at the top level; contradictions are
    refused."""
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        inside, beside = scaling.get(key), fields.get(key)
        if beside is not None:
            if inside not in (None, beside):
                raise fields.error(
                    f"{key} is {beside!r} beside the rope's parameters and {inside!r} among them; "
                    "leave one of them out"
                )
            outer = outer | {key: beside}
    return Fields(outer | {k: v for k, v in scaling.raw.items() if v is not None}, fields.where)


def rope_of_type(fields: Fields, layer_type: str) -> RopeConfig:
    """Gemma 4: the rope of `sliding_attention` or `full_attention` layers."""
    fields.only("rope_scaling")
    fields.only("partial_rotary_factor", 1.0)
    if fields.get("rope_parameters") is None:
        share = 0.25 if layer_type == FULL else 1.0
        return RopeConfig(theta=1e6 if layer_type == FULL else 1e4, rotary_share=share)
    return _rope(fields.inner("rope_parameters").inner(layer_type))


def stray_rope_keys(raw: dict) -> list[str]:
    """Keys inside of config.json's rope objects that change nothing, as "object.key"."""
    stray = []
    for name in _OBJECTS:
        inner = raw.get(name) if isinstance(raw.get(name), dict) else {}
        nested = {f"{name}.{key}": inner[key] for key in (SLIDING, FULL) if key in inner}
        for at, one in (nested or {name: inner}).items():
            if isinstance(one, dict):
                stray += [f"{at}.{key}" for key in one if key not in _INNER_KEYS]
    return sorted(stray)


def _rope(scaling: Fields) -> RopeConfig:
    if SLIDING in scaling.raw or FULL in scaling.raw:
        raise scaling.error("a rope of its own for each type of layer is not supported here")
    theta = scaling.number("rope_theta", positive=True, above=1)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    is_stated = any(scaling.get(key) is not None for key in ("rope_type", "type"))
    if scaling.get("factor") is not None and not is_stated:
        raise scaling.error("the rope's parameters state a factor, but no rope_type")
    if scaling.text("type", kind) != kind:
        raise scaling.error(
            f"rope_type is {kind!r} and type {scaling.get('type')!r}; leave one out"
        )
    if kind not in _SCALINGS:
        raise scaling.error(f"rope_type {kind!r} is not supported; {', '.join(_SCALINGS)} are")
    if kind != "proportional":
        scaling.only("partial_rotary_factor", 1.0)
    return _SCALINGS[kind](scaling, theta)


def _unscaled(scaling: Fields, theta: float) -> RopeConfig:
    return RopeConfig(theta=theta)


def _linear(scaling: Fields, theta: float) -> RopeConfig:
    return RopeConfig(theta=theta, scaling=LinearScaling(factor=_factor(scaling)))


def _dynamic(scaling: Fields, theta: float) -> RopeConfig:
    scaling.only("alpha")  # another rule of the same name
    return RopeConfig(theta=theta, scaling=DynamicScaling(factor=_factor(scaling)))


def _llama3(scaling: Fields, theta: float) -> RopeConfig:
    low = scaling.number("low_freq_factor", positive=True)
    high = scaling.number("high_freq_factor", positive=True)
    if high <= low:
        raise scaling.error(f"high_freq_factor {high} must be greater than low_freq_factor {low}")
    made = Llama3Scaling(
        factor=_factor(scaling),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=scaling.count("original_max_position_embeddings"),
    )
    return RopeConfig(theta=theta, scaling=made)


def _factor(scaling: Fields) -> float:
    factor = scaling.number("factor")
    if factor < 1:
        raise scaling.error(f"factor of rope scaling must be at least 1, not {factor}")
    return factor


def _yarn(scaling: Fields, theta: float) -> RopeConfig:
    factor = _factor(scaling)
    fast = scaling.number("beta_fast", 32.0, positive=True)
    slow = scaling.number("beta_slow", 1.0, positive=True)
    if fast < slow:
        raise scaling.error(f"beta_fast {fast} must not be less than beta_slow {slow}")
    made = YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position=scaling.count("original_max_position_embeddings"),
        truncate=scaling.flag("truncate", True),
        attention_factor=_attention_factor(scaling, factor),
    )
    return RopeConfig(theta=theta, scaling=made)


def _attention_factor(scaling: Fields, factor: float) -> float | None:
    """Stated, or of `mscale` and `mscale_all_dim`; None is YaRN's own."""
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor", positive=True)
    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        return None
    log = 0.1 * math.log(factor)
    above, below = (
        scaling.number(key, positive=True) * log + 1 for key in ("mscale", "mscale_all_dim")
    )
    return above / below


def _proportional(scaling: Fields, theta: float) -> RopeConfig:
    scaling.only("factor", 1.0)
    share = scaling.number("partial_rotary_factor", 1.0)
    if not 0 <= share <= 1:
        raise scaling.error(f"partial_rotary_factor must lie between 0 and 1, not {share}")
    return RopeConfig(theta=theta, rotary_share=share)


_SCALINGS = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
"""By `rope_type`: reads the parameters of the kind."""


def rope_json(rope: RopeConfig) -> dict:
    """`rope_theta` and `rope_scaling`, as released files have them."""
    scaling = _scaling_json(rope)
    kind = scaling.pop("rope_type")
    scaled = None if kind == "default" else {"rope_type": kind, **scaling}
    return {"rope_theta": rope.theta, "rope_scaling": scaled}


def rope_parameters_json(rope: RopeConfig) -> dict:
    """One object with all parameters, as transformers 5 writes it."""
    return {"rope_theta": rope.theta, **_scaling_json(rope)}


def _scaling_json(rope: RopeConfig) -> dict:
    scaling = rope.scaling
    match scaling:
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
        case YarnScaling():
            stated = scaling.attention_factor
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_max_position,
                "truncate": scaling.truncate,
                **({} if stated is None else {"attention_factor": stated}),
            }
    if rope.rotary_share != 1.0:
        return {"rope_type": "proportional", "partial_rotary_factor": rope.rotary_share}
    return {"rope_type": "default"}


def windows(
    fields: Fields, types: list, num_layers: int, width: int | None
) -> tuple[int | None, ...] | None:
    """Window of each layer from its type and the one width; None if no layer slides.

    Raises:
      CheckpointError: not one known type a layer, or no width.
    """
    if len(types) != num_layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise fields.error(
            f"layer_types must name {SLIDING} or {FULL} for each of {num_layers} layers, not "
            f"{types}"
        )
    if SLIDING not in types:
        return None
    if width is None:
        raise fields.error(f"layer_types names {SLIDING}, but config.json states no sliding_window")
    return tuple(width if kind == SLIDING else None for kind in types)


def windows_json(windows: tuple[int | None, ...] | None) -> dict:
    widths = {width for width in windows or () if width is not None}
    if not widths:
        return {}
    if len(widths) > 1:
        raise CheckpointError(
            f"config.json holds one sliding window; the model has {sorted(widths)}"
        )
    types = [FULL if width is None else SLIDING for width in windows]
    return {"layer_types": types, "sliding_window": widths.pop(), "use_sliding_window": True}
