"""Drafters of the user's own: `Engine(..., drafter=mine, taps=, cache=)` and `--drafter
module:Class`.

A drafter is a dataclass as `drafter.Drafter` says. `Class.load(target, config)` makes the one of a
command line. Its attributes `taps` and `cache`, where it has them, are the defaults of the engine's
arguments.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_jax.config import AttentionConfig, ConfigError, OwnDrafterConfig, TargetConfig

if TYPE_CHECKING:
    from peagle_jax.config import EngineConfig
    from peagle_jax.method.drafter import Drafter
    from peagle_jax.models import Decoder

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_own(drafter: str | Path | None) -> bool:
    """Whether a `--drafter` names a class as `module:Class`, and no folder."""
    return _NAME.fullmatch(str(drafter)) is not None and not Path(str(drafter)).exists()


def load_own(
    drafter: str | Path | None, target: "Decoder", config: "EngineConfig"
) -> "Drafter | None":
    """The drafter that `module:Class` names; None where a folder or nothing is named.

    The module is found as any other is, and at last in the working folder: nothing there hides
    another module. Processes that compile search the same folders.

    Raises:
      ConfigError: there is no such module or class, or it fails; the message has its error.
    """
    if not is_own(drafter):
        return None
    module, name = str(drafter).split(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), name).load(target, config)
    except Exception as error:  # of foreign code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"the drafter {drafter} cannot be loaded: {reason}") from error


def own_config(
    drafter: "Drafter",
    target: TargetConfig,
    taps: Sequence[int] | None = None,
    cache: Sequence[AttentionConfig] | None = None,
) -> OwnDrafterConfig:
    """What an engine needs to know of a drafter; arguments are those of `Engine`.

    Raises:
      ConfigError: it is no drafter, or taps and cache are none that this target has.
    """
    import jax  # not needed for --help

    taps = getattr(drafter, "taps", ()) if taps is None else taps
    cache = getattr(drafter, "cache", ()) if cache is None else cache
    name = type(drafter).__name__
    if not (is_dataclass(drafter) and "num_draft" in {field.name for field in fields(drafter)}):
        raise ConfigError(f"the drafter {name} must be a dataclass with a field num_draft")
    for method in ("propose", *["absorb"] * bool(cache)):
        if not callable(getattr(drafter, method, None)):
            raise ConfigError(f"the drafter {name} needs a method {method}")
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(drafter)):
        raise ConfigError(
            f"the drafter {name} must be registered by jax.tree_util.register_dataclass: its "
            "arrays are leaves, num_draft and the rest are static"
        )
    if any(tap not in range(target.num_layers + 1) for tap in taps):
        raise ConfigError(f"taps {list(taps)} must be numbers from 0 to {target.num_layers}")
    if not all(isinstance(layer, AttentionConfig) for layer in cache):
        raise ConfigError("cache must hold an AttentionConfig for each layer of the drafter")
    return OwnDrafterConfig(taps=tuple(taps), layers=tuple(cache))
