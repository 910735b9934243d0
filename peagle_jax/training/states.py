"""What a target makes of the training texts, for a target that has no room beside its head.

Beside `NAME.npz` lie `NAME.taps` [n, S, A*D] and `NAME.normed` [n, S, D], plain numbers of the
target's dtype, and `NAME.states.json`, which says how many rows are done: a killed run goes on.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from peagle_jax.config import ConfigError
from peagle_jax.models import Decoder
from peagle_jax.training.curves import write_whole
from peagle_jax.training.passes import Run, run_target
from peagle_jax.training.stored_text import Text, load_text, open_states, rows_of, states_note

_ROW_TOKENS = 8192  # of a call


def write_states(target: Decoder, taps: tuple[int, ...], folder: Path, *, most_gb: float) -> None:
    """Writes the states of all texts in `folder`.

    Raises:
      ConfigError: they take more than `most_gb`, or more than the disk has.
    """
    texts = {name: load_text(target.config, folder, name) for name in ("train", "heldout")}
    count = sum(text.tokens.size for text in texts.values())
    dtype = np.dtype(target.norm.weight.dtype)
    width = (len(taps) + 1) * target.config.hidden_size
    needed, there = count * width * dtype.itemsize / 1e9, shutil.disk_usage(folder).free / 1e9
    if needed > min(most_gb, there):
        raise ConfigError(
            f"--states-gb {most_gb:g}: the states of {count} tokens take {needed:.1f} GB, and the "
            f"disk has {there:.1f}; give more, or fewer prompts"
        )
    for name, text in texts.items():
        _write(target, taps, text, folder, name)


def _write(target: Decoder, taps: tuple[int, ...], text: Text, folder: Path, name: str) -> None:
    (count, length), dtype = text.tokens.shape, np.dtype(target.norm.weight.dtype)
    described = dict(taps=list(taps), dtype=dtype.name, hidden=target.config.hidden_size)
    note = states_note(folder, name)
    before = json.loads(note.read_text()) if note.is_file() else {"done": 0}
    if before["done"] and before != described | {"done": before["done"]}:
        raise ConfigError(f"{note}: states of another target; remove {name}.taps and {name}.normed")
    arrays = open_states(folder, name, (count, length), described, is_written=True)
    size = max(1, _ROW_TOKENS // length)
    if text.taps is not None:  # complete
        return
    run = jax.jit(lambda target, text: run_target(target, text, taps))
    with tqdm(total=count, initial=before["done"], desc=f"states of {name}", unit="row") as bar:
        for start in range(before["done"], count, size):
            # The last piece overlaps, so that all have one shape.
            rows = slice(max(0, min(start, count - size)), min(start + size, count))
            found: Run = jax.device_get(run(target, rows_of(text, rows)))
            for array, part in zip(arrays, (found.taps, found.normed), strict=True):
                array[rows] = part
                array.flush()
            write_whole(note, json.dumps(described | {"done": rows.stop}))
            bar.update(rows.stop - bar.n)


def without_layers(target: Decoder, num_kept: int) -> Decoder:
    """The target's tables, last norm and last layers, from which a head starts."""
    graph, state = nnx.split(target)
    rest = nnx.merge(graph, state)
    rest.layers = nnx.List(rest.layers[-num_kept:])
    return rest
