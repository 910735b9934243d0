"""Files of round times beside jax's persistent compilation cache, so that a warm start has them at
once.

A file belongs to one device, one set of versions and one set of programs. What else it holds is
ignored.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax

from pallas_kernels import dispatch
from peagle_jax.config import EngineConfig
from peagle_jax.cores import num_cores
from peagle_jax.engine.host.calls import RoundShape

FOLDER = "round-times"
"""Folder in the cache of compiled programs."""

_log = logging.getLogger(__name__)


class StoredTimes:
    """The file of one engine's times; every method has no effect without a persistent cache.

    Args:
      weights: all weights of the programs.
      structure: their tree structure.
      config: sizes of the engine.
    """

    def __init__(self, weights, structure, config: EngineConfig):
        folder = jax.config.jax_compilation_cache_dir
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in weights]
        cores = num_cores()
        # Static parts of the tree may be shown with their addresses, which change from run to run.
        named = re.sub("0x[0-9a-f]+", "", str(structure))
        # The number of pages follows the memory that is free at a start; it hardly changes a time.
        sizes = replace(config, num_pages=None, programs_folder=None)
        model = hashlib.sha256(repr((shapes, named, sizes)).encode()).hexdigest()
        self._key = {
            "device": dispatch.default_device().device_kind,
            "host cores": cores,
            **{name: version(name) for name in ("jax", "jaxlib", "peagle-jax")},
            "model": model,
        }
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:32]
        self.path = Path(folder) / FOLDER / f"{name}.json" if folder else None

    def load(self) -> dict[RoundShape, float]:
        """Seconds by shape; empty where there is no file, or none that can be used."""
        if self.path is None:
            return {}
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            _log.warning("%s: round times cannot be read (%s)", self.path, error.strerror)
            return {}
        try:
            return read_times(content.decode("utf-8"), self._key)
        except ValueError as error:
            _log.warning("%s: round times are ignored: %s", self.path, error)
            return {}

    def save(self, seconds: Mapping[RoundShape, float]) -> None:
        """Writes the file; a failure is a log line."""
        if self.path is None:
            return
        rows = [[*shape, seconds[shape]] for shape in sorted(seconds)]
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"key": self._key, "seconds": rows}), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            _log.warning("%s: round times cannot be kept (%s)", self.path, error.strerror)


def read_times(text: str, key: Mapping | None = None) -> dict[RoundShape, float]:
    """Seconds by shape from the text of a file.

    Args:
      key: what the file must belong to; None accepts any.

    Raises:
      ValueError: the text is no such file, or belongs to something else.
    """
    try:
        content = json.loads(text)
        rows = content["seconds"]
        if key is not None and content["key"] != key:
            raise ValueError("they belong to another device, version or model")
        times = {RoundShape(*counts): seconds for *counts, seconds in rows}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("this is no file of round times") from error
    for shape, seconds in times.items():
        is_shape = all(type(count) is int and count >= 0 for count in shape) and shape.size > 0
        is_time = type(seconds) is float and 0 < seconds < math.inf
        if not is_shape or not is_time:
            raise ValueError(f"{[*shape, seconds]} is no time of a round")
    return times
