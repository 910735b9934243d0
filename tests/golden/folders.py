"""What the golden folders hold, and folders that are written from it with changes."""

import json
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint import Checkpoint
from peagle_jax.checkpoint.safetensors import INDEX, write

GOLDEN = Path(__file__).parent


def config(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def tensors(name: str) -> dict[str, np.ndarray]:
    """Copies, which a test may change."""
    checkpoint = Checkpoint(GOLDEN / name)
    return {n: np.array(checkpoint.read(n)) for n in checkpoint.names()}


def parts(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    return config(name), tensors(name)


def written(folder: Path, raw: dict, *files: dict[str, np.ndarray]) -> Path:
    """The folder, with config.json and the tensors of one file or of several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    names = ["model.safetensors"] if len(files) == 1 else [f"{i}.safetensors" for i in range(9)]
    for name, held in zip(names, files, strict=False):
        write(folder / name, held)
    if len(files) > 1:
        places = {n: name for name, held in zip(names, files, strict=False) for n in held}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder
