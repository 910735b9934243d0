"""Where models lie, and what their config.json says about the sizes that are asked for; without jax."""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.checkpoint.fields import read_config
from peagle_jax.checkpoint.target_json import target_config
from peagle_jax.config import ConfigError, EngineConfig, Method
from peagle_jax.engine.sizes import check_sizes

ASSETS = Path(__file__).parent / "assets"


def embedded(name: str) -> Path:
    """Folder of the embedded model ("target") or of one of its heads ("peagle", "eagle3")."""
    return ASSETS / name


def check_head_is_given(
    model: str | Path | None, drafter: str | Path | None, method: Method | None
) -> None:
    """Raises ConfigError where a model of the user's drafts but no head is given."""
    if method != "none" and drafter is None and model is not None:
        raise ConfigError(
            f"drafting needs a head for {model}: give --drafter DIR, or use --method none"
        )


def check_folders(
    model: str | Path | None, drafters: Sequence[str | Path], config: EngineConfig
) -> None:
    """Looks at config.json only, so that mistakes show before jax is imported.

    Args:
      model: folder of the target; None is the embedded model.
      drafters: folders of heads.
      config: sizes that the engine will have.

    Raises:
      ConfigError: a folder without a config.json that can be used, or sizes that the model does not have.
    """
    check_sizes(target_config(embedded("target") if model is None else Path(model)), config)
    for folder in drafters:
        read_config(Path(folder))
