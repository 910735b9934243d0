"""Small checkpoints in memory, cut from the golden ones, which the fuzz tests damage."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from peagle_jax.checkpoint import Checkpoint
from peagle_jax.checkpoint.safetensors import DTYPES, INDEX
from tests.convert.conftest import GOLDEN, target_of

SEEDS = {
    "peagle-shared": None,
    "peagle-bias": None,
    "eagle3": None,
    "eagle31": None,
    "dflash2": None,
    "dspark": None,
    "peagle-pruned": None,
    "qwen2": [0],
    "mistral": [0],
    "llama-fp8-tensor": [0],
    "qwen3-fp8-channel": [0],
    "gpt_oss-bf16": [0, 1],
    "gemma4": [2, 3],
    "gemma4-text": [2, 3],
    "gpt_oss-mxfp4": [0],
    "qwen3_moe-fp8": [0, 1],
    "qwen3_moe-bf16": [0],
    "llama": [0],
    "qwen3": [0],
}
"""Golden folders, and the layers that are kept of a target; smallest first."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


@dataclass
class Tensor:
    """dtype by its name in a header, and bytes in C order; damage may make them disagree."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Folder:
    """A checkpoint; `shards`: the file of each tensor, `target`: the config of a head's target."""

    name: str
    config: dict
    tensors: dict[str, Tensor]
    generation: dict | None = None
    target: dict | None = None
    num_shards: int = 1
    header_changes: list[Callable[[dict], None]] = field(default_factory=list)

    @property
    def is_head(self) -> bool:
        return self.target is not None

    def copy(self) -> "Folder":
        clone = lambda raw: None if raw is None else json.loads(json.dumps(raw))
        return replace(
            self,
            config=clone(self.config),
            generation=clone(self.generation),
            target=clone(self.target),
            tensors={name: replace(one) for name, one in self.tensors.items()},
            header_changes=[],
        )

    def files(self) -> dict[str, bytes]:
        """name -> contents; a target's config.json is at target/config.json."""
        found = {"config.json": as_json(self.config)}
        if self.generation is not None:
            found["generation_config.json"] = as_json(self.generation)
        if self.target is not None:
            found["target/config.json"] = as_json(self.target)
        names = list(self.tensors)
        if self.num_shards == 1:
            return found | {"model.safetensors": self._file(names)}
        files = {}
        for i in range(self.num_shards):
            file = f"model-{i + 1:05d}-of-{self.num_shards:05d}.safetensors"
            part = names[i :: self.num_shards]
            found[file] = self._file(part)
            files |= dict.fromkeys(part, file)
        return found | {INDEX: as_json({"metadata": {}, "weight_map": files})}

    def _file(self, names: list[str]) -> bytes:
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            one = self.tensors[name]
            end = offset + len(one.data)
            header[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [offset, end]}
            offset = end
        for change in self.header_changes:
            change(header)
        text = as_json(header)
        data = b"".join(self.tensors[name].data for name in names)
        return len(text).to_bytes(8, "little") + text + data


def as_json(raw) -> bytes:
    return json.dumps(raw).encode()


@cache
def seed(name: str) -> Folder:
    """A golden folder, a target with few of its layers."""
    folder, layers = GOLDEN / name, SEEDS[name]
    read = lambda path: json.loads(path.read_text()) if path.is_file() else None
    checkpoint = Checkpoint(GOLDEN / "gemma4" if name == "gemma4-text" else folder)
    tensors = {
        one: Tensor(DTYPE_NAMES[info.dtype], list(info.shape), checkpoint.read(one).tobytes())
        for one, info in checkpoint.tensors.items()
    }
    config, target = read(folder / "config.json"), None
    if layers is None:
        target = read(target_of(name) / "config.json")
    else:
        tensors = _cut(tensors, layers)
        _cut_config(config.get("text_config", config), layers)
    return Folder(name, config, tensors, read(folder / "generation_config.json"), target)


def _cut(tensors: dict[str, Tensor], layers: list[int]) -> dict[str, Tensor]:
    kept = {}
    for name, one in tensors.items():
        found = _LAYER.search(name)
        if found is None or "tower" in name:
            kept[name] = one
        elif int(found[0]) in layers:
            kept[_LAYER.sub(str(layers.index(int(found[0]))), name)] = one
    return kept


def _cut_config(config: dict, layers: list[int]) -> None:
    config["num_hidden_layers"] = len(layers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][i] for i in layers]
    if dense := config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [layers.index(i) for i in dense if i in layers]
    if wide := config.get("per_layer_config"):
        config["per_layer_config"] = {
            str(i): wide[str(layer)] for i, layer in enumerate(layers) if str(layer) in wide
        }


def write(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
