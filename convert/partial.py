"""Atomic, resumable output folder: `NAME.partial` with a lock and a journal, renamed when complete.

The first line of `NAME.partial/journal.jsonl` identifies source and output; each finished group adds a
line. After a killed run the next run resumes after the last complete line.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peagle_jax.checkpoint.safetensors import CheckpointError

JOURNAL = "journal.jsonl"


def partial_path(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial")


class Partial:
    """An open output folder: write into `folder`; `done` are all journal entries, of earlier runs too."""

    def __init__(self, final: Path, folder: Path):
        self.final, self.folder = final, folder
        self.done: list[dict] = []

    def begin(self, identity: dict) -> None:
        """Reads the journal of an unfinished run, or starts one.

        Raises:
          CheckpointError: the unfinished run had a different source or plan.
        """
        journal = self.folder / JOURNAL
        lines = journal.read_bytes().splitlines(keepends=True) if journal.is_file() else []
        complete = [
            line for line in lines if line.endswith(b"\n")
        ]  # the last line may be incomplete
        try:
            entries = [dict(json.loads(line)) for line in complete]
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{journal}: damaged ({error}); give --restart to begin anew"
            ) from error
        if not entries:
            journal.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            return
        if entries[0] != json.loads(json.dumps(identity)):
            raise CheckpointError(
                f"{self.folder}: left by an unfinished conversion of {entries[0].get('name')!r} that was "
                "another checkpoint, has changed since, or was cut in other groups; give --restart to "
                "begin anew"
            )
        self.done = entries[1:]
        journal.write_bytes(b"".join(complete))

    def record(self, entry: dict) -> None:
        """Adds a journal entry for a group. The group must be complete on disk."""
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done.append(entry)

    def finish(self) -> None:
        """Renames the folder to its final name, after an fsync of its contents."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        sync_tree(self.folder)
        self.folder.rename(self.final)  # replaces an empty folder
        _sync(self.final.parent)


def check_apart(final: Path, sources: Iterable[Path]) -> None:
    """Refuses output folders (`final`, its .partial) inside of a source folder, or that contain one.

    Raises:
      CheckpointError: names both folders.
    """
    for source in sources:
        read = Path(os.path.realpath(source))
        for folder in (final, partial_path(final)):
            written = Path(os.path.realpath(folder))
            where = "inside" if _lies_in(written, read) else "around"
            if where == "inside" or _lies_in(read, written):
                raise CheckpointError(
                    f"{final}: {folder} would be written {where} {source}, which is read; give a folder "
                    "beside it"
                )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or below it; both without symlinks."""
    return any(_is_same(one, folder) for one in (path, *path.parents))


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)  # by inode: bind mounts, names that differ in case
    except OSError:
        return first == second


@contextmanager
def opened(final: Path, *, restart: bool = False) -> Iterator[Partial]:
    """Opens or creates the partial folder of `final`, locked against other runs.

    Args:
      restart: delete the partial folder of an earlier run.
    Raises:
      CheckpointError: `final` is not empty, another run is writing it, or it cannot be created.
    """
    folder = partial_path(final)
    try:
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointError(
                f"{final}: exists and is not empty; give another folder or delete it"
            )
        lock = _lock(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        if final.exists() and any(final.iterdir()):  # another run finished before we had the lock
            raise CheckpointError(f"{final}: another run has just finished it")
        if restart:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield Partial(final, folder)
    finally:
        os.close(lock)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock on the folder until it is closed."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(f"{folder}: another run is writing it; wait for it") from error
        except FileNotFoundError:
            pass  # renamed by its owner between the two lines above
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Calls fsync on a folder and all files in it."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot fsync folders
            raise
    finally:
        os.close(descriptor)


def check_room(folder: Path, nbytes: int) -> None:
    """Raises:
    CheckpointError: the disk of `folder` has not that many free.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CheckpointError(
            f"{folder.parent}: {nbytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        )
