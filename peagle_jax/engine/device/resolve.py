"""The configuration of an engine, with all that its caller left open chosen: a pure function of
what the engine is made of and runs on."""

import logging
from dataclasses import replace

from peagle_jax.config import DrafterConfig, EngineConfig, OwnDrafterConfig, TargetConfig
from peagle_jax.engine.device.memory import (
    DeviceSummary,
    fit_pages,
    fit_rings,
    has_long_prefills,
    saved_bytes,
)
from peagle_jax.engine.device.round_shapes import rounds_per_call

_log = logging.getLogger(__name__)


def resolve_config(
    target: TargetConfig,
    drafter: DrafterConfig | OwnDrafterConfig | None,
    config: EngineConfig,
    devices: DeviceSummary,
    *,
    weights_bytes: int,
) -> EngineConfig:
    """`config` with every size chosen, as programs are compiled for it.

    Args:
      drafter: None is plain decoding.
      devices: those that run the engine, summed up once they hold the weights: caches get what is
        left (`memory.summary_of`).
      weights_bytes: of target and drafter.

    Raises:
      ConfigError: what is asked for does not fit the models or the memory of the devices.
    """
    is_plain, is_head = drafter is None, isinstance(drafter, DrafterConfig)
    sizes = replace(
        config,
        num_draft=0 if is_plain else config.num_draft,
        adaptive="off" if is_plain else config.adaptive,
        block_rows=drafter.block_rows(config.num_draft) if is_head else 0,
        gather=config.gather if config.tensor_parallel == 1 else devices.gather,
        max_model_len=min(config.max_model_len, target.max_position),
    )
    shapes = replace(
        sizes,
        rounds_per_call=config.rounds_per_call
        or rounds_per_call(sizes, devices.platform, weights_bytes),
        saved_rings=fit_rings(target, drafter, sizes, devices.free_bytes),
        long_prefills=has_long_prefills(target, drafter, sizes),
    )
    if num_bytes := saved_bytes(target, drafter, shapes):
        _log.info("%d saved rings use %.1f MB", shapes.saved_rings, num_bytes / 1e6)
    return replace(shapes, num_pages=fit_pages(target, drafter, shapes, devices))
