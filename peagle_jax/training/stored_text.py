"""Texts that a target wrote, and their batches."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from peagle_jax.config import ConfigError, TargetConfig


class Text(NamedTuple):
    """A batch of texts: tokens 0..prompt-1 are the prompt, prompt..length-1 are the target's answer.

    A row of several texts, one behind the other, has `answer`: which of its tokens are trained.
    """

    tokens: jax.Array  # [B, S]
    prompt: jax.Array  # [B] int32
    length: jax.Array  # [B] int32
    answer: jax.Array | None = None  # [B, S] bool

    def arrays(self) -> dict[str, jax.Array]:
        """The fields that there are, by name: the content of a file."""
        return {name: x for name, x in self._asdict().items() if x is not None}


def rows_of(text: Text, index) -> Text:
    """The rows of an index array or a slice."""
    return jax.tree.map(lambda x: x[index], text)


def load_text(
    config: TargetConfig,
    folder: Path,
    name: str,
    max_temperature: float | None = None,
    *,
    flag: str = "--text",
) -> Text:
    """Texts of `{name}.npz`, for a target with this config; `flag` is the option that gave `folder`.

    Args:
      max_temperature: leaves out texts that were sampled above it.
    Raises:
      ConfigError: the file cannot be read, or holds what the target cannot have written.
    """
    path = folder / f"{name}.npz"
    try:
        return _read(path, config, max_temperature)
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds for broken files
        raise ConfigError(f"{flag} {path}: {error}") from error


def _read(path: Path, config: TargetConfig, max_temperature: float | None) -> Text:
    with np.load(path) as file:
        arrays = dict(file)
    missing = [key for key in ("tokens", "prompt", "length") if key not in arrays]
    if missing:
        raise ConfigError(f"has no array {missing[0]!r}")
    text = Text(*(arrays.get(key) for key in Text._fields))
    _check(text, config)
    if max_temperature is None:
        return text
    heat = arrays.get("temperature", np.zeros(0))
    if heat.shape != text.prompt.shape:
        raise ConfigError("has no temperatures; leave out --max-temperature")
    return rows_of(text, heat <= max_temperature)


def _check(text: Text, config: TargetConfig) -> None:
    """Raises `ConfigError` for texts that are no `Text`, or not of this target."""
    whole = lambda x, ndim: np.issubdtype(x.dtype, np.integer) and x.ndim == ndim
    tokens, prompt, length, answer = text
    count, width = tokens.shape if tokens.ndim == 2 else (0, 0)
    packed = answer is not None
    ends = (
        whole(tokens, 2)
        and all(whole(x, 1) and len(x) == count for x in (prompt, length))
        and (not packed or (answer.dtype == bool and answer.shape == tokens.shape))
    )
    if not ends:
        raise ConfigError(
            "needs whole numbers tokens [n, S], prompt [n] and length [n], and answer [n, S] of bool or none"
        )
    if not count:
        raise ConfigError("has no texts")
    if width > config.max_position:
        raise ConfigError(
            f"has texts of {width} tokens; the target's max_position is {config.max_position}"
        )
    if not ((prompt >= 1) & (prompt <= length) & (length <= width)).all():
        raise ConfigError(f"needs 1 <= prompt <= length <= {width} for every text")
    if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise ConfigError(f"has token {wrong}; the target's vocabulary has {config.vocab_size}")
    # A draft is trained where its token and the one before it were written.
    some = (answer[:, 1:] & answer[:, :-1]).any() if packed else (length - prompt >= 2).any()
    if not some:
        raise ConfigError("has no text with two written tokens, so nothing to train")


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
    cut = lambda x: None if x is None else x.reshape(-1, length)[kept]
    return Text(cut(text.tokens), prompt[kept], used[kept], cut(text.answer))


def batches(text: Text, size: int, seed: int) -> Callable[[int], Text]:
    """Step -> `size` of the texts, without repetition in an epoch."""
    per_epoch = len(text.tokens) // size

    def batch(step: int) -> Text:
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(text.tokens))
        chosen = np.sort(order[at * size : (at + 1) * size])
        return rows_of(text, chosen)

    return batch
