"""Other weights for the programs of an engine."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.checkpoint.incoming import Weights, arranged, is_stored, loaded
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.programs import Programs
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter, make_drafter
from peagle_jax.models import Decoder

_donated = jax.jit(lambda array: array, donate_argnums=0)
"""The same memory as another array; the one given is deleted."""
_kept = lambda array: array


def drafter_of(head: DraftHead, target: Decoder, config: EngineConfig, devices: Devices) -> Drafter:
    """The drafter of an engine's head."""
    return make_drafter(
        head,
        config.num_draft,
        config.draft_sampling,
        selector=config.selector,
        target=target if devices.count == 1 else None,
    )


class Replacement(NamedTuple):
    """Checked and arranged models, and how their arrays become the engine's own."""

    target: Decoder
    drafter: Drafter | None
    take: tuple[Callable, Callable]

    def take_over(self, programs: Programs) -> None:
        """Gives the programs these weights."""
        programs.replace_models(self.target, self.drafter, self.take)


def replacement(
    programs: Programs,
    devices: Devices,
    config: EngineConfig,
    weights: Weights | None,
    head: Weights | None,
    *,
    donate: bool,
    makes_drafter: bool,
) -> Replacement:
    """The models that take the place of an engine's.

    Args:
      weights, head, donate: as of `Engine.update_weights`.
      makes_drafter: whether the drafter is that of a head; else it stays.

    Raises:
      ConfigError: names what differs.
    """
    target, drafter = programs.models
    models = {"target": target, "head": getattr(drafter, "head", None)}
    takes, problems = dict.fromkeys(models, _kept), []
    for name, given in (("target", weights), ("head", head)):
        if given is None:
            continue
        try:
            like = models[name]
            if is_stored(given):
                given = loaded(given, like, target.config, devices)
            else:
                takes[name] = _donated if donate else jnp.copy
            models[name] = arranged(given, like, devices, frees=donate)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    if makes_drafter:
        drafter = drafter_of(models["head"], models["target"], config, devices)
    return Replacement(models["target"], drafter, (takes["target"], takes["head"]))
