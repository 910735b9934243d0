"""Sampling controls of a request, as the device takes them at admission. No jax here."""

from collections.abc import Collection

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.request import Request
from peagle_jax.method.plan import ControlsPlan
from peagle_jax.sampling_params import MAX_BIAS, MAX_END_IDS

_NO_TOKEN = 2**31 - 1
"""Outside of every vocabulary: an entry without effect."""


def idle_controls(config: EngineConfig) -> ControlsPlan:
    """Controls of the dummy slot, without effect."""
    return ControlsPlan(
        slot=np.int32(config.max_num_seqs),
        tokens=np.zeros(config.max_model_len, np.int32),
        num_prompt=np.int32(0),
        num_tokens=np.int32(0),
        bias_ids=np.full(MAX_BIAS, _NO_TOKEN, np.int32),
        bias=np.zeros(MAX_BIAS, np.float32),
        base=np.float32(0.0),
        end_ids=np.full(MAX_END_IDS, _NO_TOKEN, np.int32),
        min_end=np.int32(0),
        repetition=np.float32(1.0),
        frequency=np.float32(0.0),
        presence=np.float32(0.0),
    )


def controls_of(
    request: Request, config: EngineConfig, eos_ids: Collection[int]
) -> ControlsPlan | None:
    """Controls of an admitted request; None if it has none."""
    if not request.params.is_adjusted:
        return None
    params, plan = request.params, idle_controls(config)
    tokens = request.tokens
    plan.tokens[: len(tokens)] = tokens
    bias = params.biases(request.banned_ids)
    plan.bias_ids[: len(bias)], plan.bias[: len(bias)] = list(bias), list(bias.values())
    if params.min_tokens:
        ends = params.end_ids(eos_ids)
        plan.end_ids[: len(ends)] = list(ends)
    return plan._replace(
        slot=np.int32(request.slot),
        num_prompt=np.int32(len(request.prompt)),
        num_tokens=np.int32(len(tokens)),
        base=np.float32(0.0 if params.allowed_token_ids is None else -np.inf),
        min_end=np.int32(min(len(request.prompt) + params.min_tokens, config.max_model_len)),
        repetition=np.float32(params.repetition_penalty),
        frequency=np.float32(params.frequency_penalty),
        presence=np.float32(params.presence_penalty),
    )
