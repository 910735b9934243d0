"""What a target makes of the training texts, for a target that has no room beside its head.

Beside `NAME.npz` lie, for the taps 2, 15 and 27, `NAME-states-2-15-27.taps` [n, S, A*D] and
`.normed` [n, S, D], plain numbers of the target's dtype, and `.json`, which says how many rows are
done: a killed run goes on.
"""

import json
import shutil
from pathlib import Path

import jax
from flax import nnx
from tqdm import tqdm

from peagle_jax.config import ConfigError
from peagle_jax.models import Decoder
from peagle_jax.training.curves import write_whole
from peagle_jax.training.passes import Run, run_target
from peagle_jax.training.stored_text import (
    Text,
    load_text,
    open_states,
    read_note,
    rows_of,
    states_path,
)

_ROW_TOKENS = 8192  # of a call


def write_states(target: Decoder, taps: tuple[int, ...], folder: Path, *, most_gb: float) -> None:
    """Writes the states of all texts in `folder` that are not there yet.

    Raises:
      ConfigError: they take more than `most_gb`, or what is left more than the disk has.
    """
    texts = {name: load_text(target.config, folder, name) for name in ("train", "heldout")}
    width, dtype = (len(taps) + 1) * target.config.hidden_size, target.norm.weight.dtype
    gb = lambda tokens: tokens * width * dtype.itemsize / 1e9
    done = {name: read_note(states_path(folder, name, taps))["done"] for name in texts}
    whole = gb(sum(text.tokens.size for text in texts.values()))
    left = gb(sum(text.tokens[done[name] :].size for name, text in texts.items()))
    there = shutil.disk_usage(folder).free / 1e9
    if whole > most_gb or left > there:
        raise ConfigError(
            f"--states-gb {most_gb:g}: the states take {whole:.4g} GB, {left:.4g} of them are to "
            f"be written, and the disk has {there:.4g}; give more, or fewer prompts"
        )
    for name, text in texts.items():
        _write(target, taps, text, states_path(folder, name, taps), name)


def _write(target: Decoder, taps: tuple[int, ...], text: Text, path: Path, name: str) -> None:
    count, length = text.tokens.shape
    done, size = read_note(path)["done"], max(1, _ROW_TOKENS // length)
    if done == count:
        return
    note = dict(dtype=target.norm.weight.dtype.name, hidden=target.config.hidden_size)
    arrays = open_states(path, (count, length), len(taps), note, is_written=True)
    run = jax.jit(lambda target, text: run_target(target, text, taps))
    with tqdm(total=count, initial=done, desc=f"states of {name}", unit="row") as bar:
        for start in range(done, count, size):
            # The last piece overlaps, so that all have one shape.
            rows = slice(max(0, min(start, count - size)), min(start + size, count))
            found: Run = jax.device_get(run(target, rows_of(text, rows)))
            for array, part in zip(arrays, (found.taps, found.normed), strict=True):
                array[rows] = part
                array.flush()
            write_whole(path.with_suffix(".json"), json.dumps(note | {"done": rows.stop}))
            bar.update(rows.stop - bar.n)


def without_layers(target: Decoder, num_kept: int) -> Decoder:
    """The target's tables, last norm and last layers, from which a head starts."""
    graph, state = nnx.split(target)
    rest = nnx.merge(graph, state)
    rest.layers = nnx.List(rest.layers[-num_kept:])
    return rest
