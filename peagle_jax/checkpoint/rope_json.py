"""Rotary embeddings in `config.json` <-> `RopeConfig`, and which layers slide.

Released files have `rope_theta` and `rope_scaling`, those of transformers 5 `rope_parameters`; Gemma 4
has one such object for each type of layer.
"""

import math

from peagle_jax.checkpoint.fields import Fields
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import Llama3Scaling, RopeConfig, YarnScaling

SLIDING, FULL = "sliding_attention", "full_attention"


def rope_config(fields: Fields, default_theta: float | None = None) -> RopeConfig:
    """The rope that all layers share; theta must be stated unless there is a default.

    Raises:
      CheckpointError: unknown kind of scaling, or an incomplete one.
    """
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    scaling = fields.inner(key, {})
    if scaling.get("rope_theta") is None:
        theta = fields.number("rope_theta", default_theta)
        scaling = Fields(scaling.raw | {"rope_theta": theta}, fields.where)
    fields.only("partial_rotary_factor", 1.0)
    return _rope(scaling)


def rope_of_type(fields: Fields, layer_type: str) -> RopeConfig:
    """Gemma 4: the rope of `sliding_attention` or `full_attention` layers."""
    return _rope(fields.inner("rope_parameters").inner(layer_type))


def _rope(scaling: Fields) -> RopeConfig:
    theta = scaling.number("rope_theta")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            scaling.only("partial_rotary_factor", 1.0)
            return RopeConfig(theta=theta)
        case "llama3":
            return RopeConfig(theta=theta, scaling=_llama3(scaling))
        case "yarn":
            scaling.only("partial_rotary_factor", 1.0)
            return RopeConfig(theta=theta, scaling=_yarn(scaling))
        case "proportional":
            scaling.only("factor", 1.0)
            share = scaling.number("partial_rotary_factor", 1.0)
            return RopeConfig(theta=theta, rotary_share=share)
    raise scaling.error(
        f"rope_type {kind!r} is not supported; default, llama3, yarn and proportional are"
    )


def _llama3(scaling: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.count("original_max_position_embeddings"),
    )


def _yarn(scaling: Fields) -> YarnScaling:
    factor = scaling.number("factor")
    if factor < 1:
        raise scaling.error(f"factor of yarn must be at least 1, not {factor}")
    attention = scaling.get("attention_factor")
    if attention is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        log = 0.1 * math.log(factor)
        attention = (scaling.number("mscale") * log + 1) / (
            scaling.number("mscale_all_dim") * log + 1
        )
    elif attention is not None:
        attention = scaling.number("attention_factor")
    return YarnScaling(
        factor=factor,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        original_max_position=scaling.count("original_max_position_embeddings"),
        truncate=scaling.flag("truncate", True),
        attention_factor=attention,
    )


def rope_json(rope: RopeConfig) -> dict:
    """`rope_theta` and `rope_scaling`, as released files have them."""
    scaling = _scaling_json(rope)
    kind = scaling.pop("rope_type")
    scaled = None if kind == "default" else {"rope_type": kind, **scaling}
    return {"rope_theta": rope.theta, "rope_scaling": scaled}


def rope_parameters_json(rope: RopeConfig) -> dict:
    """One object with everything, as transformers 5 has it."""
    return {"rope_theta": rope.theta, **_scaling_json(rope)}


def _scaling_json(rope: RopeConfig) -> dict:
    scaling = rope.scaling
    match scaling:
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


def windows(fields: Fields, types: list[str], num_layers: int) -> tuple[int | None, ...] | None:
    """Window of each layer from its type; None if no layer slides.

    Raises:
      CheckpointError: not one known type a layer, or no width.
    """
    if len(types) != num_layers or any(one not in (SLIDING, FULL) for one in types):
        raise fields.error(
            f"layer_types must name {SLIDING} or {FULL} for each of {num_layers} layers, not {types}"
        )
    if SLIDING not in types:
        return None
    width = fields.count("sliding_window")
    return tuple(width if one == SLIDING else None for one in types)


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
