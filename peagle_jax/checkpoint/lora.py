"""LoRA adapters of `peft`, merged into a target while it is loaded.

    adapter_config.json         r, lora_alpha, use_rslora, rank_pattern, alpha_pattern
    adapter_model.safetensors   base_model.model.PATH.lora_A.weight [r, in], .lora_B.weight [out, r]

Source: `peft.tuners.lora` of peft 0.21. What changes the product in another way is refused by name.
`fan_in_fan_out` changes nothing: peft ignores it for linear layers, and all modules here are such.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from peagle_jax.checkpoint.fields import Fields, named
from peagle_jax.checkpoint.layout import FLOATS, Layout, Rule
from peagle_jax.checkpoint.lora_json import read_adapter_config
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, TensorInfo
from peagle_jax.checkpoint.values import not_finite

_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_PREFIX = re.compile(r"^(?:model\.|language_model\.)*")
_MOST_NAMED = 10
_OTHERS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "LoRA of embeddings",
    "lora_B.bias": "lora_bias",
}


class _Update(NamedTuple):
    """Names of A [r, in] and B [out, r] in the adapter, and the factor of their product."""

    a: str
    b: str
    scale: float


class Adapter:
    """An adapter of a folder. `fit` says whether it fits a target, `merged` adds it.

    Raises:
      CheckpointError: the folder holds no adapter, or one that cannot be merged.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._scales = _Scales(read_adapter_config(self._folder))
        self._tensors = Checkpoint(self._folder, _WEIGHTS)
        self._pairs = self._read_pairs()
        self._updates: dict[str, _Update] = {}

    def fit(self, layout: Layout, tensors: Mapping[str, TensorInfo]) -> None:
        """Finds the weight of each module, by the headers of both and the values of the adapter.

        Args:
          layout: of the target's tensors.

        Raises:
          CheckpointError: names all modules that do not fit.
        """
        weights = {
            _PREFIX.sub("", name): tensors[name]
            for rule in layout.rules
            if rule.path[-1] == "weight" and rule.path[0] != "embed"
            for name in rule.names
            if len(tensors[name].shape) == 2 and ".experts." not in name
        }
        wrong = []
        for module, (a, b) in self._pairs.items():
            info = weights.get(f"{_PREFIX.sub('', module)}.weight")
            reason = _reason(module) if info is None else self._misfit(module, info)
            if reason is None:
                self._updates[info.name] = _Update(a, b, self._scales.of(module))
            else:
                wrong.append(f"{module} {reason}")
        if wrong:
            more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            raise CheckpointError(f"{self._folder}: {'; '.join(wrong[:_MOST_NAMED])}{more}")

    def merged(
        self, rule: Rule, array: np.ndarray, tensors: Mapping[str, TensorInfo]
    ) -> np.ndarray:
        """The parameter of a rule with the adapter: W + scale * B A in float32, in W's dtype.

        Args:
          array: the parameter as the checkpoint has it.
          tensors: of the checkpoint.

        Raises:
          CheckpointError: a sum exceeds the dtype.
        """
        if not any(name in self._updates for name in rule.names):
            return array
        parts = rule.transform.split(array, [tensors[name] for name in rule.names])
        pairs = zip(rule.names, parts, strict=True)
        return rule.transform.join([self._sum(name, part) for name, part in pairs])

    def _sum(self, name: str, weight: np.ndarray) -> np.ndarray:
        update = self._updates.get(name)
        if update is None:
            return weight
        a, b = (self._tensors.read(one).astype(np.float32) for one in (update.a, update.b))
        try:
            with np.errstate(over="raise"):
                total = weight.astype(np.float32) + np.float32(update.scale) * (b @ a)
                return total.astype(weight.dtype)
        except FloatingPointError as error:
            raise CheckpointError(f"{self._folder}: {name}: exceeds {weight.dtype}") from error

    def _read_pairs(self) -> dict[str, tuple[str, str]]:
        """The names of A and B by module."""
        found: dict[str, dict[str, str]] = {}
        for name in self._tensors.names():
            match = _KEY.fullmatch(name)
            if match is None:
                kind = next((kind for part, kind in _OTHERS.items() if part in name), None)
                kind = kind or "weights saved whole (modules_to_save, or embeddings)"
                raise CheckpointError(
                    f"{self._folder}: {name}: {kind} cannot be merged; lora_A and lora_B can"
                )
            found.setdefault(match[1], {})[match[2]] = name
        if not found:
            raise CheckpointError(f"{self._folder}: {_WEIGHTS} holds no lora_A and lora_B")
        alone = [next(iter(pair.values())) for pair in found.values() if len(pair) < 2]
        if alone:
            raise CheckpointError(f"{self._folder}: without its lora_A or lora_B: {named(alone)}")
        return {module: (pair["A"], pair["B"]) for module, pair in found.items()}

    def _misfit(self, module: str, weight: TensorInfo) -> str | None:
        """Why A and B do not fit a weight; None if they do."""
        a, b = (self._tensors.info(name) for name in self._pairs[module])
        rank, (rows, columns) = self._scales.rank(module), weight.shape
        if (a.shape, b.shape) != ((rank, columns), (rows, rank)):
            return (
                f"is {a.shape} and {b.shape}, and a weight {weight.shape} with rank {rank} needs "
                f"{(rank, columns)} and {(rows, rank)}"
            )
        if weight.dtype not in FLOATS:
            return f"is {weight.dtype} in the target: merge it before the target is quantised"
        for info in (a, b):
            if info.dtype not in FLOATS:
                return f"is {info.dtype}, not a float"
            if any(bad := not_finite(self._tensors.read(info.name))):
                return f"holds {bad} numbers"
        return None


def _reason(module: str) -> str:
    if "experts" in module:
        return "is of experts, which are not merged"
    if module.endswith(("embed_tokens", "lm_head")):
        return "is the embedding, or a head that is tied to it"
    return "is no linear layer of the target"


class _Scales:
    """Ranks and factors of an adapter's modules."""

    def __init__(self, config: Fields):
        self._rank, self._alpha = config.count("r", 8), config.number("lora_alpha", 8.0)
        self._ranks = {key: of.count(key) for key, of in _patterns(config, "rank_pattern")}
        self._alphas = {key: of.number(key) for key, of in _patterns(config, "alpha_pattern")}
        self._has_root = config.flag("use_rslora")

    def rank(self, module: str) -> int:
        """The inner width of the product."""
        return _matched(self._ranks, module, self._rank)

    def of(self, module: str) -> float:
        """The factor of the product."""
        rank = self.rank(module)
        return _matched(self._alphas, module, self._alpha) / (rank**0.5 if self._has_root else rank)


def _patterns(config: Fields, key: str) -> list[tuple[str, Fields]]:
    """The regular expressions of an object, each with the object."""
    raw = config.get(key, {})
    if not isinstance(raw, dict):
        raise config.error(f"{key} must be an object, not {raw!r}")
    fields = Fields(raw, f"{config.where}: {key}")
    for pattern in raw:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(f"{pattern!r} is no regular expression ({error})") from error
    return [(pattern, fields) for pattern in raw]


def _matched[T](values: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches the module's name, or the end of it."""
    matches = (one for key, one in values.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)
