"""Copies the files beside the weights: configs, tokenizer, and the headers that `export` needs."""

import shutil
from pathlib import Path

from convert.source import Source, read_header_bytes
from peagle_jax.checkpoint.safetensors import INDEX

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_LIMIT = 100_000_000


def copy_side_files(source: Path, folder: Path) -> None:
    """Copies config.json, tokenizer, chat template and similar files, but no weights and no index."""
    for path in sorted(source.iterdir()):
        is_side = path.suffix in _SUFFIXES and not path.name.endswith(".index.json")
        if is_side and path.is_file() and path.stat().st_size <= _LIMIT:
            shutil.copyfile(path, folder / path.name)


def copy_headers(source: Source, folder: Path) -> None:
    """Copies headers and index of the source's files byte for byte, and the config of a head's target."""
    kept = folder / "source"
    kept.mkdir(exist_ok=True)
    for file in source.tensors.files:
        header = read_header_bytes(source.tensors.folder / file.name)
        (kept / f"{file.name}.header").write_bytes(header)
    if (source.tensors.folder / INDEX).is_file():
        shutil.copyfile(source.tensors.folder / INDEX, kept / INDEX)
    if source.target_folder is not None:
        (kept / "target").mkdir(exist_ok=True)
        for path in source.target_folder.glob("*config.json"):
            shutil.copyfile(path, kept / "target" / path.name)
