"""Texts that `continuations` wrote, and their batches."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from peagle_jax.config import ConfigError, TargetConfig


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


def load_text_of(
    config: TargetConfig,
    folder: Path,
    name: str,
    max_temperature: float | None = None,
    *,
    flag: str = "--text",
) -> Text:
    """`load_text`, for texts that a target with this config can read; `flag` is the option that gave `folder`.

    Raises:
      ConfigError: a token lies outside of the target's vocabulary.
    """
    text = load_text(folder, name, max_temperature)
    highest = int(text.tokens.max(initial=0))
    if highest >= config.vocab_size:
        raise ConfigError(
            f"{flag} has token {highest}; the target's vocabulary has {config.vocab_size}"
        )
    return text


def pieces(text: Text, length: int) -> Text:
    """Texts cut into pieces of `length` tokens; pieces of a prompt alone are left out.

    Raises:
      ConfigError: pieces of this length do not make up a text.
    """
    width = text.tokens.shape[1]
    if width % length:
        raise ConfigError(f"--text-length {length} does not divide the texts' {width} tokens")
    start = np.arange(0, width, length)
    inside = lambda ends: np.clip(ends[:, None] - start, 0, length).reshape(-1).astype(np.int32)
    prompt, used = inside(text.prompt), inside(text.length)
    # A slot is trained if its token was generated and another one follows.
    kept = used - np.maximum(prompt, 1) >= 2
    return Text(text.tokens.reshape(-1, length)[kept], prompt[kept], used[kept])


def batches(text: Text, size: int, seed: int) -> Callable[[int], Text]:
    """Step -> `size` of the texts, without repetition in an epoch."""
    per_epoch = len(text.tokens) // size

    def batch(step: int) -> Text:
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(text.tokens))
        chosen = np.sort(order[at * size : (at + 1) * size])
        return Text(*(x[chosen] for x in text))

    return batch
