"""Makes the engine of a server's settings. The process of the engine imports this; the other
processes need no jax.
"""

import itertools
import secrets
from dataclasses import replace

from peagle_jax import Engine, EngineConfig
from peagle_jax.cli import runs
from peagle_jax.cli.loading import load_weights
from peagle_jax.engine.device.memory import pages_in
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.own_drafters import load_own, own_config
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import tile_columns
from serving.settings import GPU_SLOTS, Settings, engine_config, num_bytes


def make_engine(settings: Settings) -> Engine:
    """The engine of the settings, not yet warm.

    Raises:
      ConfigError: see `load_weights` and `Engine`.
    """
    config = sized_config(settings)
    target, head, tokenizer = load_weights(
        settings.model,
        settings.drafter,
        method=settings.method,
        dtype=config.dtype,
        quantization=settings.quantization,
        tensor_parallel=settings.tensor_parallel,
        activations=config.activations,
        lora=settings.lora,
    )
    tile_columns(target, head)
    drafter = load_own(settings.drafter, target, config)
    return engine_of(settings, config, target, head, tokenizer=tokenizer, drafter=drafter)


def sized_config(settings: Settings) -> EngineConfig:
    """The engine's config on this device, without the pages of `kv_cache_memory`."""
    config = engine_config(settings, runs.choose_dtype(settings.dtype))
    if settings.max_num_seqs is None and runs.on_gpu():
        config = replace(config, max_num_seqs=GPU_SLOTS)
    names = "prefill_chunk", "prefill_rows", "small_prefills"
    return runs.with_prefill_sizes(config, **{name: getattr(settings, name) for name in names})


def engine_of(
    settings: Settings, config: EngineConfig, target: Decoder, head: DraftHead | None, **parts
) -> Engine:
    """The engine of models that are on the device.

    Args:
      config: of `sized_config`.
      parts: further arguments of `Engine`.

    Raises:
      ConfigError: see `Engine`.
    """
    if settings.kv_cache_memory is not None:
        given, drafter = num_bytes(settings.kv_cache_memory), parts.get("drafter")
        drafts = None if head is None else head.config
        if head is None and drafter is not None:
            drafts = own_config(drafter, target.config)
        pages = pages_in(given, target.config, drafts, config)
        config = replace(config, num_pages=pages)
    engine = Engine(target, head, config, **parts)
    # Requests without a seed are drawn anew after each start, and by each of several servers.
    engine.numbers = itertools.count(secrets.randbits(62))
    return engine
