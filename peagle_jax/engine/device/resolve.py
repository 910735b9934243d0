"""The configuration of an engine, with all that its caller left open chosen."""

import logging
from dataclasses import replace

from peagle_jax.config import DrafterConfig, EngineConfig, OwnDrafterConfig, TargetConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.memory import fit_pages, fit_rings, has_long_prefills, saved_bytes
from peagle_jax.engine.device.round_shapes import rounds_per_call

_log = logging.getLogger(__name__)


def resolve_config(
    target: TargetConfig,
    drafter: DrafterConfig | OwnDrafterConfig | None,
    config: EngineConfig,
    devices: Devices,
    *,
    weights_bytes: int,
) -> EngineConfig:
    """`config` with every size chosen, as programs are compiled for it.

    Args:
      drafter: None is plain decoding.
      devices: those that run the engine; they hold the weights already, beside which caches fit.
      weights_bytes: of target and drafter.

    Raises:
      ConfigError: what is asked for does not fit the models or the memory of the devices.
    """
    is_plain = drafter is None
    sizes = replace(
        config,
        num_draft=0 if is_plain else config.num_draft,
        adaptive="off" if is_plain else config.adaptive,
        gather=_gather(config, devices),
        max_model_len=min(config.max_model_len, target.max_position),
    )
    shapes = replace(
        sizes,
        rounds_per_call=config.rounds_per_call or rounds_per_call(sizes, weights_bytes),
        saved_rings=fit_rings(target, drafter, sizes),
        long_prefills=has_long_prefills(target, drafter, sizes),
    )
    if num_bytes := saved_bytes(target, drafter, shapes):
        _log.info("%d saved rings use %.1f MB", shapes.saved_rings, num_bytes / 1e6)
    return replace(shapes, num_pages=fit_pages(target, drafter, shapes))


def _gather(config: EngineConfig, devices: Devices) -> str:
    if devices.count == 1:
        return config.gather
    return "peers" if devices.peers else "library"
