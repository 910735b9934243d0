"""A new folder: written as `NAME.partial` under a lock, renamed when it is complete."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peagle_jax.checkpoint.folder_lock import lock_folder
from peagle_jax.checkpoint.safetensors import CheckpointError

_SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_MOST_SIDE_BYTES = 100_000_000


def copy_side_files(source: Path, folder: Path) -> None:
    """Copies config.json, tokenizer, chat template and the like, but no weights and no index."""
    for path in sorted(source.iterdir()):
        is_side = path.suffix in _SIDE_FILES and not path.name.endswith(".index.json")
        if is_side and path.is_file() and path.stat().st_size <= _MOST_SIDE_BYTES:
            shutil.copyfile(path, folder / path.name)


@contextmanager
def new_folder(final: Path, nbytes: int, sources: Iterable[Path]) -> Iterator[Path]:
    """A folder to write into, which becomes `final` where the block ends; removed where it fails.

    What a killed run left is deleted first.

    Args:
      nbytes: that will be written at least.
      sources: folders that are read.
    Raises:
      CheckpointError: `final` is not empty, or inside or around a source, another run is writing
        it, it cannot be created, or its disk is full.
    """
    folder = final.with_name(f"{final.name}.partial")
    _check_apart(final, folder, sources)
    try:
        _check_empty(final)
        lock = lock_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        _check_empty(final)  # another run may have finished before we had the lock
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise CheckpointError(
                f"{final.parent}: {nbytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
            )
        yield folder
        os.sync()  # else a loss of power could leave empty files under the final name
        folder.rename(final)  # replaces an empty folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{final}: {error.strerror or error}") from error
        raise
    finally:
        os.close(lock)


def _check_empty(final: Path) -> None:
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final}: exists and is not empty; give another folder or delete it")


def _check_apart(final: Path, partial: Path, sources: Iterable[Path]) -> None:
    """Refuses an output folder inside of a source folder, or that contains one."""
    for source in sources:
        read = Path(os.path.realpath(source))
        for folder in (final, partial):
            written = Path(os.path.realpath(folder))
            where = "inside" if _lies_in(written, read) else "around"
            if where == "inside" or _lies_in(read, written):
                raise CheckpointError(
                    f"{final}: {folder} would be written {where} {source}, which is read; give a "
                    "folder beside it"
                )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or below it; both without symlinks."""
    return any(_is_same(one, folder) for one in (path, *path.parents))


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)  # by inode: bind mounts, names that differ in case
    except OSError:
        return first == second
