"""Model folders: paths of the embedded model, and checks of config.json that need no jax."""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.config import ConfigError, EngineConfig, Method
from peagle_jax.engine.device.sizes import check_sizes
from peagle_jax.method.own_drafters import is_own
from peagle_jax.parallel.shares import check_shares

ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED_HEADS = ("eagle3", "peagle")
"""Methods of which the embedded model has a head."""


def embedded(name: str) -> Path:
    """Folder of the embedded model ("target") or of one of its heads ("peagle", "eagle3")."""
    return ASSETS / name


def local_folder(given: str | Path | None) -> str | Path | None:
    """A model's folder: `given`, or the download of a hub id "owner/name"; None and `module:Class`
    stay as they are.

    Raises:
      ConfigError: the hub id cannot be downloaded; the message says why.
    """
    if given is None or is_own(given):
        return given
    from peagle_jax.checkpoint.hub import resolve  # not needed for --help

    return resolve(str(given))[0]


def local_models(
    model: str | Path | None, drafter: str | Path | None, method: Method | None
) -> tuple[str | Path | None, str | Path | None]:
    """Folders of a target and its drafter, which may be one that ships with the package.

    Args:
      model, drafter: as in `local_folder`. None for the drafter of a target other than the embedded
        one is the head of `method` that ships for it.

    Raises:
      ConfigError: a target without such a head, a hub id that cannot be downloaded, or a method
        beside a drafter of the user's own.
    """
    needs_head = drafter is None and model is not None and method != "none"
    if needs_head:
        _check_may_have_heads(str(model))
    check_method(model, drafter, method)
    folder = local_folder(model)
    head = head_of(folder, method, name=model) if needs_head else local_folder(drafter)
    return folder, head


def check_method(
    model: str | Path | None, drafter: str | Path | None, method: Method | None
) -> None:
    """Raises ConfigError if the embedded model has no head of the method, or if one is given with a
    drafter of the user's own."""
    if is_own(drafter) and method is not None:
        raise ConfigError(f"method {method} is of a head: leave it out with the drafter {drafter}")
    if drafter is None and model is None and method not in (None, "none", *EMBEDDED_HEADS):
        raise ConfigError(f"the embedded model has no {method} head: give --drafter DIR")


def head_of(folder: str | Path, method: Method | None, *, name: str | Path | None = None) -> Path:
    """The head that ships for the target in a folder; None for the method takes P-EAGLE before
    others.

    Args:
      name: of the target in an error; None: the folder.
    Raises:
      ConfigError: there is none.
    """
    from peagle_jax.checkpoint.shipped import shipped_heads  # numpy, which --help does not need

    heads = shipped_heads(folder)
    others = None if method else next(iter(heads.values()), None)
    found = heads.get(method or "peagle", others)
    if found is None:
        raise no_head(name or folder)
    return found


def no_head(model: str | Path) -> ConfigError:
    """The error for a target that needs a head."""
    return ConfigError(
        f"drafting needs a head for {model}: give --drafter DIR, or use --method none"
    )


def _check_may_have_heads(model: str) -> None:
    """Before gigabytes are downloaded: raises ConfigError for a folder that is not there, and for a
    hub id that no head ships for."""
    from peagle_jax.checkpoint.hub import is_hub_id
    from peagle_jax.checkpoint.shipped import has_shipped_heads

    if model.startswith(("/", ".")) and not Path(model).exists():
        raise ConfigError(f"{model}: no such folder")
    if is_hub_id(model) and not has_shipped_heads(model):
        raise no_head(f"{model} (no folder here, so the id of a hub)")


def check_folders(
    model: str | Path | None,
    drafters: Sequence[str | Path],
    config: EngineConfig,
    *,
    lora: str | Path | None = None,
) -> None:
    """Checks model folders and engine sizes by config.json alone, before jax is imported.

    Args:
      model: folder of the target; None is the embedded model.
      drafters: folders of heads.
      config: the engine's sizes.
      lora: folder of an adapter for the target.

    Raises:
      ConfigError: a folder without a usable config.json, or sizes above the model's limits.
    """
    from peagle_jax.checkpoint.fields import read_config  # numpy, which --help does not need
    from peagle_jax.checkpoint.lora_json import read_adapter_config
    from peagle_jax.checkpoint.target_json import target_config

    if lora is not None:
        read_adapter_config(Path(lora))
    target = target_config(embedded("target") if model is None else Path(model))
    check_sizes(target, config)
    check_shares(target, config.tensor_parallel)
    for folder in drafters:
        if not is_own(folder):
            read_config(Path(folder))
        elif config.tensor_parallel > 1:
            raise ConfigError(f"the drafter {folder} runs on one device, not on several")
