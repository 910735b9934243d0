"""Texts that `continuations` wrote, and their batches."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from peagle_jax.config import ConfigError


class Text(NamedTuple):
    """A batch of continuations: tokens 0..prompt-1 are the prompt, prompt..length-1 are generated."""

    tokens: jax.Array  # [B, S]
    prompt: jax.Array  # [B] int32
    length: jax.Array  # [B] int32


def load_text(folder: Path, name: str, max_temperature: float | None = None) -> Text:
    """`{name}.npz` as written by `continuations`; only texts sampled up to a temperature, if given."""
    path = folder / f"{name}.npz"
    with np.load(path) as file:
        text = Text(file["tokens"], file["prompt"], file["length"])
        if max_temperature is None:
            return text
        if "temperature" not in file:
            raise ConfigError(f"{path} has no temperatures; leave out --max-temperature")
        kept = file["temperature"] <= max_temperature
    return Text(*(x[kept] for x in text))


def batches(text: Text, size: int, seed: int) -> Callable[[int], Text]:
    """Step -> `size` of the texts, without repetition in an epoch."""
    per_epoch = len(text.tokens) // size

    def batch(step: int) -> Text:
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(text.tokens))
        chosen = np.sort(order[at * size : (at + 1) * size])
        return Text(*(x[chosen] for x in text))

    return batch
