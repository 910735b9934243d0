"""Compiled programs on disk, so that a later start of the same engine neither traces nor lowers nor
compiles.

jax's persistent cache saves what XLA does only: a start still traces and lowers each program, which
takes most of the time of a program with many kernels. Here a file holds the whole executable. Its
name is the digest of all that decides the program (`StoredPrograms.key_of`).

An executable is machine code, and jax pickles what belongs to it: who can write such a file can run
code as the user who loads it. So a folder or a file that another user owns or can write is not
used. A file begins with a digest of its name and content, so that a damaged file is never
unpickled. The digest is no signature. Trees are not in the files: they are made from the operands
of the call.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import platform
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as library
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels import dispatch
from peagle_jax.config import EngineConfig
from peagle_jax.engine.device.program_descriptions import (
    NotDescribed,
    describe,
    describe_tree,
    sources,
)

FOLDER = "programs"
"""Folder in the cache of compiled programs."""

PLATFORMS = ("cpu", "cuda")
"""On TPUs the first program chooses the layouts of the weights (`layouts`), and must be compiled
anew."""

MOST_BYTES = 8 * 2**30
"""Maximum size of the folder; the files that were not used for the longest time are removed
first."""

_FORMAT = b"peagle-jax program 1\n"
_UNFINISHED_SECONDS = 3600  # an older file of an interrupted write is removed
_SUFFIX, _LIBRARY_SUFFIX = ".program", ".jax"

_HOST_FIELDS = (
    *("batch_sizes", "max_waiting", "prefix_caching", "adaptive"),
    *("greedy_rounds", "programs_folder"),
)
"""Fields of the configuration that choose programs, options of the compiler or belong to the host;
no program reads them."""

_VARIABLES = (
    "XLA_",
    "JAX_",
    "LIBTPU_",
    "TPU_",
    "TF_",
    "MOSAIC_",
    "NVIDIA_TF32",
    "CUBLAS_",
    "CUDNN_",
)
_NO_VARIABLES = (
    *("XLA_PYTHON_CLIENT_", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"),
    *("JAX_ENABLE_COMPILATION_CACHE", "TF_CPP_"),
    *("MOSAIC_GPU_RUNTIME_LIB_PATH", "MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_NVSHMEM_"),
)
"""Settings of memory, caches and logs, and the paths that jax sets once it has traced a kernel: no
program depends on them."""

_NO_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache")

_log = logging.getLogger(__name__)


def use_library_cache(folder: Path) -> None:
    """Keeps what jax itself compiles in this folder, by the rules of programs: small ones, which no
    engine asks for by name."""
    if _own_folder(folder) is None:
        return
    library.get_file_cache = lambda path: (_LibraryCache(Path(path)), path)
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _LibraryCache:
    """jax's cache with owners and digests; its own one reads whatever has the name of a key."""

    def __init__(self, folder: Path):
        self._path = folder

    def get(self, key: str) -> bytes | None:
        """The entry of a key, if it can be used."""
        path = self._path / f"{key}{_LIBRARY_SUFFIX}"
        try:
            return _read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s is ignored: %s", path, error)
            return None

    def put(self, key: str, entry: bytes) -> None:
        """Keeps the entry of a key."""
        _write(self._path / f"{key}{_LIBRARY_SUFFIX}", entry)


class StoredPrograms:
    """The programs of one engine in its `programs_folder`; without one every program is compiled.

    Args:
      structure: tree structure of the weights.
      config: sizes of the engine.
      devices: those that run the programs.
      statics: names and values of what the functions close over.
    """

    def __init__(self, structure, config: EngineConfig, devices: list, statics: dict):
        self._folder, self._devices, self._engine = None, devices, ""
        platform = dispatch.platform()
        if config.programs_folder is None or platform not in PLATFORMS:
            return
        # A subclass adds what chooses batch buckets: which programs there are, not what they do.
        given = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
        given = {name: value for name, value in given.items() if name not in _HOST_FIELDS}
        try:
            parts = {
                "structure": describe_tree(structure),
                "config": describe(given),
                "statics": describe(statics),
            }
        except NotDescribed as reason:
            _log.info("programs are not kept on disk: %s", reason)
            return
        where = {
            "sources": sources(),
            "versions": _versions(),
            "tracing": repr(dispatch.trace()),
            "devices": [[device.id, device.platform, device.device_kind] for device in devices],
            "runtime": devices[0].client.platform_version,
            "host": _processor() if platform == "cpu" else "",
            "variables": _variables(),
            "settings": _settings(),
        }
        if platform == "cuda":
            # It tells the runtime where the library of Mosaic's kernels is, as tracing a kernel
            # would. Without it a program with such kernels does not load.
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")
        self._engine = json.dumps([parts, where], sort_keys=True)
        self._folder = _own_folder(config.programs_folder)

    def key_of(self, name: str, operands: tuple, options: dict) -> str:
        """The digest of everything that decides the program of this name, over shapes of
        operands."""
        leaves, structure = jax.tree.flatten(operands)
        call = [name, [_shape(leaf) for leaf in leaves], describe_tree(structure), options]
        return hashlib.sha256(json.dumps([self._engine, call]).encode()).hexdigest()

    def path_of(self, name: str, operands: tuple, options: dict) -> Path | None:
        """The program's file; None if programs are not kept."""
        if self._folder is None:
            return None
        return self._folder / f"{self.key_of(name, operands, options)}{_SUFFIX}"

    def program(
        self,
        name: str,
        operands: tuple,
        results: Any,
        lower: Callable[..., jax.stages.Lowered],
        options: dict,
    ) -> Callable:
        """The compiled program, from its file if there is one.

        Args:
          operands: shapes of all operands.
          results: a tree with the structure of the results.
          lower: traces and lowers the function for the operands.
          options: of the compiler.
        """
        path = self.path_of(name, operands, options)
        if path is None:
            return lower(*operands).compile(compiler_options=options)
        trees = jax.tree.structure((operands, {})), jax.tree.structure(results)
        if (program := self._load(path, trees)) is not None:
            return program
        lowered = lower(*operands)
        with _fresh():
            program = lowered.compile(compiler_options=options | _autotuning())
        _save(path, program, trees)
        return program

    def _load(self, path: Path, trees: tuple) -> Callable | None:
        try:
            content = zlib.decompress(_read(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, zlib.error) as error:
            _log.warning("%s is ignored: %s", path, error)
            return None
        try:
            program = serialize_executable.deserialize_and_load(
                content, *trees, execution_devices=self._devices
            )
        except Exception as error:  # whatever the runtime refuses compiles anew
            _log.warning("%s cannot be loaded and is compiled anew: %s", path, line(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks the file as used
        return program


def _shape(leaf) -> list:
    """Shape, dtype and sharding of an operand, which its program depends on. On `PLATFORMS` layouts
    follow from shapes."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    return [list(leaf.shape), str(leaf.dtype), str(spec)]


@cache
def _versions() -> list[str]:
    """Distributions that take part in compiling, with versions."""
    names = ("jax", "jaxlib", "flax", "numpy", "libtpu", "nvidia")
    packages = ((package.name or "", package.version) for package in distributions())
    return sorted(
        {f"{name} {version}" for name, version in packages if name.lower().startswith(names)}
    )


@cache
def _processor() -> str:
    """The kind of this machine's processor, its instruction sets and the number of cores: code for
    a CPU has all of them in it."""
    described = [platform.machine(), platform.processor(), str(os.cpu_count())]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        described += sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join(described)


def _variables() -> list[str]:
    named = (name for name in os.environ if name.startswith(_VARIABLES))
    return sorted(f"{x}={os.environ[x]}" for x in named if not x.startswith(_NO_VARIABLES))


def _settings() -> list[str]:
    return sorted(f"{name}={value}" for name, value in settings())


def settings() -> list[tuple[str, Any]]:
    """jax's settings, which programs depend on; one that is set within a `with` alone does not
    count."""
    values = jax.config.values.items()
    return [(name, value) for name, value in values if not name.startswith(_NO_SETTINGS)]


def _own_folder(folder: Path) -> Path | None:
    """The folder, made if it is missing; None if another user owns it or can write to it."""
    if not hasattr(os, "geteuid"):
        return None  # without owners of files, another user's code could be loaded
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own = _is_own(os.lstat(folder), stat.S_ISDIR)
    except OSError as error:
        _log.warning("%s: programs cannot be kept (%s)", folder, error.strerror)
        return None
    if not is_own:
        _log.warning(
            "%s: programs are not kept: it must be a folder of this user that no other can write "
            "to (chmod 700)",
            folder,
        )
        return None
    return folder


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & others


def _read(path: Path) -> bytes:
    """The content of a file, without its head.

    Raises:
      OSError: it cannot be read.
      ValueError: it belongs to another user, or is damaged.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not _is_own(os.fstat(number), stat.S_ISREG):
            raise ValueError("another user owns it or can write to it")
        content = file.read()
    digest, body = content[len(_FORMAT) : len(_FORMAT) + 32], content[len(_FORMAT) + 32 :]
    if not content.startswith(_FORMAT) or digest != _digest(path, body):
        raise ValueError("it is damaged")
    return body


def _digest(path: Path, body: bytes) -> bytes:
    return hashlib.sha256(path.stem.encode() + body).digest()


def _save(path: Path, program, trees: tuple) -> None:
    """Writes a program; a failure is a log line."""
    try:
        content, *own = serialize_executable.serialize(program)
    except Exception as error:  # of what the runtime cannot serialise nothing is kept
        _log.warning("a program cannot be kept on disk: %s", line(error))
        return
    if tuple(own) != trees:
        _log.warning("a program cannot be kept on disk: its trees are not those of its operands")
        return
    _write(path, zlib.compress(content, 1))
    with contextlib.suppress(OSError):
        make_room(path.parent)


def _write(path: Path, body: bytes) -> None:
    """Writes a file with this content; a failure is a log line."""
    try:
        # With mode 0600: programs are code, which other users must not write.
        number, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")
        with open(number, "wb") as file:
            file.write(_FORMAT + _digest(path, body) + body)
        os.replace(part, path)
    except OSError as error:
        _log.warning("%s: a program cannot be kept (%s)", path, error.strerror)


def make_room(folder: Path, most_bytes: int | None = None) -> None:
    """Removes the files used the longest ago until the others take at most `most_bytes`,
    `MOST_BYTES` without it.

    Another process may do the same: a file that is gone already is no failure.
    """
    files, now = [], time.time()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            known = path.stat()
            if path.suffix == _SUFFIX:
                files.append((known.st_mtime, known.st_size, path))
            elif path.suffix == ".part" and now - known.st_mtime > _UNFINISHED_SECONDS:
                path.unlink()
    left = sum(size for _, size, _ in files) - (MOST_BYTES if most_bytes is None else most_bytes)
    for _, size, path in sorted(files):
        if left <= 0:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        left -= size


_compiling = threading.Lock()
_num_compiling = 0
_was_enabled = True


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Compiles without jax's persistent cache: an executable from there cannot be serialised again
    (on a CPU it loads, and fails when it runs). Other threads compile without it meanwhile, too."""
    global _num_compiling, _was_enabled
    with _compiling:
        if _num_compiling == 0:
            _was_enabled = jax.config.jax_enable_compilation_cache
            _use_cache(False)
        _num_compiling += 1
    try:
        yield
    finally:
        with _compiling:
            _num_compiling -= 1
            if _num_compiling == 0:
                _use_cache(_was_enabled)


def _use_cache(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    compilation_cache.reset_cache()  # jax asks once whether it is enabled


def _autotuning() -> dict[str, str]:
    """Where XLA keeps the choices of its GPU kernels, as with jax's cache."""
    folder = jax.config.jax_compilation_cache_dir
    if dispatch.platform() != "cuda" or not folder:
        return {}
    name = "xla_gpu_per_fusion_autotune_cache_dir"
    return {name: str(Path(folder) / name)}


def line(error: Exception) -> str:
    """The kind of an error and the beginning of its message, as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
