"""Validation of arguments, before heavy libraries are imported."""

from pathlib import Path

from peagle_jax.checkpoint.gguf_file import is_gguf
from peagle_jax.checkpoint.hub import is_hub_id
from peagle_jax.config import ConfigError
from peagle_jax.presets import PRESETS


def check(args) -> None:
    """Validates the arguments of any command.

    Raises:
      ConfigError: a folder does not exist, or a preset is unknown.
    """
    if args.command == "synthetic":
        if args.preset not in PRESETS:
            raise ConfigError(f"no preset {args.preset!r}; there are {', '.join(PRESETS)}")
        return
    folders = [args.source, getattr(args, "target", None)]
    folders += [args.folder] if args.command == "verify" else []
    for folder in map(str, filter(None, folders)):
        if not Path(folder).is_dir() and not is_hub_id(folder) and not is_gguf(folder):
            raise ConfigError(f"{folder}: no such folder")
