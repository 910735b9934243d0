"""Writes a quantised target as an unquantised Hugging Face folder."""

from pathlib import Path

from convert.side_files import copy_side_files
from peagle_jax.checkpoint import CheckpointError, load_target, save_target
from peagle_jax.checkpoint.converted import MANIFEST
from peagle_jax.checkpoint.loader import dequantize


def write_dequantized(source: Path, folder: Path, dtype: str) -> None:
    """Writes the values of all weights in `dtype`, with tokenizer and other side files.

    It holds the whole model in memory.

    Raises:
      CheckpointError: the source cannot be loaded, or `folder` has files already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: exists already; give a new folder")
    model = load_target(source, dtype=dtype)
    dequantize(model, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    copy_side_files(source, folder)
    (folder / MANIFEST).unlink(missing_ok=True)  # of a converted source
    save_target(model, folder, dtype=dtype)
