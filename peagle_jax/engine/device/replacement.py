"""Other weights for the programs of an engine."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from peagle_jax.checkpoint.incoming import (
    Weights,
    by_name,
    checked,
    is_stored,
    loaded,
    placements,
)
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.programs import Programs
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter, make_drafter
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import ordered_as

_donated = jax.jit(lambda array: array, donate_argnums=0)
"""The same memory as another array; the one given is deleted."""


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
    """Checked weights, where the caller has them, and how they become the engine's own."""

    take: list[Callable | None]
    make_drafter: Callable | None

    def take_over(self, programs: Programs) -> None:
        """Gives the programs these weights, and then what the drafter derives from them."""
        programs.replace_weights(self.take)
        if self.make_drafter is None:
            return
        target, drafter = programs.models
        drafter = self.make_drafter(drafter.head, target)
        derived = [
            None if name.startswith("head.") else lambda before, leaf=leaf: leaf
            for name, leaf in by_name(drafter).items()
        ]
        programs.replace_weights([None] * len(jax.tree.leaves(target)) + derived)


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
    """The weights that take the place of an engine's. Nothing changes yet.

    Args:
      weights, head, donate: as of `Engine.update_weights`.
      makes_drafter: whether the drafter is that of a head; else it stays.

    Raises:
      ConfigError: names what differs.
    """
    target, drafter = programs.model_shapes
    pairs = {"target": (weights, target), "head": (head, getattr(drafter, "head", None))}
    found, problems = {name: {} for name in pairs}, []
    for name, (given, like) in pairs.items():
        if given is None:
            continue
        try:
            if is_stored(given):
                given = loaded(given, like, target.config)
            found[name] = checked(given, like, devices)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    ids = [id(value) for arrays in found.values() for value in arrays.values()]
    ids += {id(leaf) for leaf in jax.tree.leaves(programs.models)}
    repeats = {each for each, count in Counter(ids).items() if count > 1}
    take = {}
    for name, arrays in found.items():
        places = placements(arrays, pairs[name][1], devices) if arrays else {}
        for leaf, value in arrays.items():
            is_given = donate and isinstance(value, jax.Array) and id(value) not in repeats
            own = partial(_taken, value, place=places[leaf], is_given=is_given)
            take[leaf if name == "target" else f"head.{leaf}"] = own
    leaves = [take.get(name) for name in by_name(target)]
    leaves += [take.get(name) if name.startswith("head.") else None for name in by_name(drafter)]
    make = partial(drafter_of, config=config, devices=devices) if makes_drafter else None
    return Replacement(leaves, make)


def _taken(value, before: jax.Array, *, place: Callable, is_given: bool) -> jax.Array:
    """The engine's own array with the numbers of the caller's.

    Args:
      place: of `incoming.placements`.
      is_given: whether to delete the caller's.
    """
    placed = place(value)
    own = ordered_as(placed, before)
    is_new = isinstance(value, np.ndarray) and dispatch.platform() != "cpu"
    is_new |= placed.dtype != value.dtype  # it is quantised
    if own is placed and not is_new:
        own = _donated(placed) if is_given else jnp.copy(placed)
    if is_given:
        value.delete()
    return own
