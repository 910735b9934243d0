"""Resolves a model's name to a folder: downloads a hub id's root files, converts a GGUF file."""

import re
from collections.abc import Sequence
from pathlib import Path

from peagle_jax.checkpoint.gguf_file import is_gguf
from peagle_jax.checkpoint.safetensors import CheckpointError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MODEL = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
CONFIGS = ("config.json", "generation_config.json")
_FOLDERS = ["*/*"]
"""Root files only: subfolders hold other copies of the weights (gpt-oss's `original/` and
`metal/`)."""


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id and is not a local folder."""
    return not Path(text).exists() and _ID.fullmatch(text) is not None


def resolve(
    text: str, revision: str | None = None, *, wanted: Sequence[str] = MODEL
) -> tuple[Path, str]:
    """(folder, label) of a local folder, a GGUF file or a hub id.

    Args:
      text: a folder, a GGUF file (or a wheel or zip that holds one), else "owner/name".
      revision: branch, tag or commit on the hub; None is its default branch.
      wanted: patterns of the files to download.
    Raises:
      CheckpointError: it cannot be downloaded; the message says why and what to do instead.
    """
    if is_gguf(text) and not Path(text).is_dir():
        from peagle_jax.checkpoint.gguf_folder import folder_of  # other models do not need it

        return folder_of(Path(text)), Path(text).name
    if not is_hub_id(text):
        return Path(text), Path(text).absolute().name
    folder = _download(text, revision, wanted)
    # The cache names a snapshot's folder by its commit.
    return folder, f"{text}@{folder.name}"


def _download(name: str, revision: str | None, wanted: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(wanted), ignore_patterns=_FOLDERS
            )
        )
    except errors.GatedRepoError as error:
        raise _error(name, "its licence must be accepted on the hub first") from error
    except errors.RepositoryNotFoundError as error:
        why = "the hub has no such model, or it is private: log in with `hf auth login`"
        raise _error(name, why) from error
    except errors.RevisionNotFoundError as error:
        raise _error(name, f"the hub has no revision {revision!r} of it") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _error(name, "the hub cannot be reached and no copy is cached") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise _error(name, f"the download failed ({_first_line(error)})") from error


def _error(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: no such folder here, and as a hub id: {why}; give the path of a downloaded folder"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
