"""Texts that a target wrote, and their batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import ConfigError, TargetConfig


class Text(NamedTuple):
    """Texts: tokens 0..prompt-1 are the prompt, prompt..length-1 are the target's answer.

    A row of several texts, one behind the other, has `answer`: which of its tokens are trained.
    Texts whose target has no room beside its head have what the target made of them.
    """

    tokens: jax.Array  # [B, S]
    prompt: jax.Array  # [B] int32
    length: jax.Array  # [B] int32
    answer: jax.Array | None = None  # [B, S] bool
    taps: jax.Array | None = None  # [B, S, A*D]
    normed: jax.Array | None = None  # [B, S, D], input of the unembedding


def rows_of(text: Text, index) -> Text:
    """The rows of an index array or a slice."""
    return jax.tree.map(lambda x: x[index], text)


def load_text(
    config: TargetConfig, folder: Path, name: str, taps: tuple[int, ...] | None = None
) -> Text:
    """Texts of `folder/{name}.npz`, for a target with this config.

    Args:
      taps: those of which the texts get the states, where `folder` has them for all texts.
    Raises:
      ConfigError: the file cannot be read, or holds what the target cannot have written.
    """
    path = folder / f"{name}.npz"
    try:
        text = _read(path, config)
        return text if taps is None else _with_states(text, states_path(folder, name, taps), taps)
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds for broken files
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path, config: TargetConfig) -> Text:
    with np.load(path) as file:
        arrays = dict(file)
    missing = [key for key in ("tokens", "prompt", "length") if key not in arrays]
    if missing:
        raise ConfigError(f"has no array {missing[0]!r}")
    text = Text(*(arrays.get(key) for key in Text._fields))
    _check(text, config)
    return text


def states_path(folder: Path, name: str, taps: tuple[int, ...]) -> Path:
    """Of the states of texts, as `states.write_states` makes them, without the suffix: `.json` says
    what is there, `.taps` and `.normed` are the arrays."""
    return folder / f"{name}-states-{'-'.join(map(str, taps))}"


def read_note(path: Path) -> dict:
    """What `write_states` noted: `done`, the number of rows, and `dtype` and `hidden`."""
    note = path.with_suffix(".json")
    return json.loads(note.read_text()) if note.is_file() else {"done": 0}


def open_states(
    path: Path, shape: tuple[int, int], num_taps: int, note: dict, *, is_written: bool = False
) -> list[np.memmap]:
    """Taps and normed states of texts [n, S], mapped; those to be written are made if missing."""
    found = []
    for suffix, width in ((".taps", num_taps * note["hidden"]), (".normed", note["hidden"])):
        file = path.with_suffix(suffix)
        mode = "r" if not is_written else "r+" if file.is_file() else "w+"
        found.append(np.memmap(file, jnp.dtype(note["dtype"]), mode, shape=(*shape, width)))
    return found


def _with_states(text: Text, path: Path, taps: tuple[int, ...]) -> Text:
    note = read_note(path)
    if note["done"] < len(text.tokens):
        return text
    tapped, normed = open_states(path, text.tokens.shape, len(taps), note)
    return text._replace(taps=tapped, normed=normed)


def _check(text: Text, config: TargetConfig) -> None:
    """Raises `ConfigError` for texts that are no `Text`, or not of this target."""
    whole = lambda x, ndim: np.issubdtype(x.dtype, np.integer) and x.ndim == ndim
    tokens, prompt, length, answer = text[:4]
    count, width = tokens.shape if tokens.ndim == 2 else (0, 0)
    packed = answer is not None
    ends = (
        whole(tokens, 2)
        and all(whole(x, 1) and len(x) == count for x in (prompt, length))
        and (not packed or (answer.dtype == bool and answer.shape == tokens.shape))
    )
    if not ends:
        raise ConfigError(
            "needs whole numbers tokens [n, S], prompt [n] and length [n], "
            "and answer [n, S] of bool or none"
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


def batches(text: Text, size: int, seed: int) -> Callable[[int], Text]:
    """Step -> `size` of the texts, without repetition in an epoch.

    Raises:
      ConfigError: there are fewer texts.
    """
    if size > len(text.tokens):
        raise ConfigError(f"a step has {size} texts, and there are {len(text.tokens)}")
    per_epoch = len(text.tokens) // size

    def batch(step: int) -> Text:
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(text.tokens))
        chosen = np.sort(order[at * size : (at + 1) * size])
        return rows_of(text, chosen)

    return batch


def held_out(text: Text, batch: int, most: int) -> list[Text]:
    """At most `most` texts for an evaluation, in pieces of a quarter of a batch.

    Raises:
      ConfigError: there is no whole piece.
    """
    size = max(1, batch // 4)
    count = min(most, len(text.tokens)) // size * size
    if not count:
        raise ConfigError(f"a piece has {size} held-out texts, and there are {len(text.tokens)}")
    return [rows_of(text, slice(i, i + size)) for i in range(0, count, size)]
