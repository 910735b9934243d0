"""Validation of arguments, before jax is imported."""

from bench.arguments import PRESET_SUFFIX
from peagle_jax.config import MAX_NUM_DRAFT, ConfigError, EngineConfig
from peagle_jax.model_folders import check_folders
from peagle_jax.presets import PRESETS


def check(args) -> None:
    """Validates the options that several commands share.

    Raises:
      ConfigError: too many drafts, an unknown preset, a folder that cannot be used.
    """
    for k in getattr(args, "k", None) or ():
        if k > MAX_NUM_DRAFT:
            raise ConfigError(f"-K {k} is above {MAX_NUM_DRAFT}, the most drafts of a round")
    preset = getattr(args, "preset", None)
    if preset is not None and preset.removesuffix(PRESET_SUFFIX) not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
    if preset is None and hasattr(args, "methods"):
        longest = getattr(args, "max_model_len", EngineConfig.max_model_len)
        check_folders(args.model, args.drafter, EngineConfig(max_model_len=longest))
