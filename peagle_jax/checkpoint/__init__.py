"""Hugging Face folders <-> models: `load_target`, `load_head`, `save_target`, `save_head`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from peagle_jax.checkpoint.config_json import (
    drafter_config,
    head_json,
    target_config,
    target_json,
)
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, write
from peagle_jax.checkpoint.tables import Rule, head_rules, target_rules
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter import DraftHead
from peagle_jax.models import Dense, build

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_head",
    "load_target",
    "save_head",
    "save_target",
    "target_config",
]

_TRAINING_ONLY = ("t2d", "rotary_emb.inv_freq")


def _fill(abstract, rules: list[Rule], read, dtype, where: str) -> None:
    """Replaces the abstract parameters that `rules` name by tensors; shapes must agree exactly."""
    state = nnx.state(abstract)
    params = dict(nnx.to_flat_state(state))
    for rule in rules:
        variable = params[rule.path]
        parts = [read(name) for name in rule.names]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
        if rule.path == ("mask_hidden",):
            array = array.reshape(-1)  # stored as [1, 1, X], [1, X] or [X]
        if array.shape != variable.shape:
            raise CheckpointError(
                f"{where}: {' + '.join(rule.names)} has shape {array.shape}, the config says {variable.shape}"
            )
        # Through numpy: a cast on the device would hold two copies of the weight there.
        variable.set_value(jnp.asarray(np.asarray(array, dtype=jnp.dtype(dtype))))


def _refuse_unused(
    checkpoint: Checkpoint, rules: list[Rule], also: tuple[str, ...], prefix: str, what: str
) -> None:
    used = {name for rule in rules for name in rule.names} | {*also}
    unused = [
        name
        for name in checkpoint.names()
        if name.removeprefix(prefix) not in used and not name.endswith(_TRAINING_ONLY)
    ]
    if unused:
        raise CheckpointError(
            f"{checkpoint.folder}: tensors without a place in {what}: {unused[:5]}"
        )


def load_target(folder: str | Path, *, dtype: str) -> Dense:
    """A target model from a Hugging Face folder.

    Raises:
      CheckpointError: the folder is no supported model, or tensors are missing, unused or misshapen.
    """
    folder = Path(folder)
    config = target_config(folder)
    checkpoint = Checkpoint(folder)
    model = nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0)))
    rules = target_rules(config)
    _fill(model, rules, checkpoint.read, dtype, str(folder))
    # A tied model may store its head a second time.
    also = ("lm_head.weight",) if config.tie_embeddings else ()
    _refuse_unused(checkpoint, rules, also, "", config.family)
    return model


def _load_d2t(read, tensors: set[str], config: DrafterConfig, where: str) -> np.ndarray | None:
    """Offsets [Vd]: target id = draft id + d2t. None for the full vocabulary.

    Some trainers write absolute ids, which can pass for offsets; t2d, the mask [V] of target ids that
    have a draft id, tells them apart.
    """
    Vd, V = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if Vd == V:
            return None
        raise CheckpointError(
            f"{where}: the draft vocabulary has {Vd} of {V} tokens but there is no d2t"
        )
    d2t = read("d2t").reshape(-1).astype(np.int64)
    if Vd == V and np.array_equal(d2t, np.arange(V)):
        return None  # absolute ids of the whole vocabulary
    ids = np.arange(len(d2t)) + d2t
    if len(d2t) != Vd or np.any(np.diff(ids) <= 0) or ids.min() < 0 or ids.max() >= V:
        raise CheckpointError(
            f"{where}: d2t must hold {Vd} offsets to ascending target ids below {V}; "
            "absolute ids need 'd2t - arange(len(d2t))'"
        )
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(read("t2d")), ids):
        raise CheckpointError(
            f"{where}: d2t and t2d name different target ids; d2t must hold offsets, "
            "absolute ids need 'd2t - arange(len(d2t))'"
        )
    return None if Vd == V else d2t.astype(np.int32)


def load_head(folder: str | Path, target: TargetConfig, *, dtype: str) -> DraftHead:
    """A P-EAGLE or EAGLE-3 head in the AWS, SafeAILab, SpecForge or speculators layout.

    Raises:
      CheckpointError: the head is broken or does not fit `target`.
    """
    folder = Path(folder)
    where = str(folder)
    checkpoint = Checkpoint(folder)
    prefix = "model." if any(n.startswith("model.") for n in checkpoint.names()) else ""
    locate = lambda name: prefix + name if prefix + name in checkpoint else name
    tensors = {name.removeprefix(prefix) for name in checkpoint.names()}
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{where}: no fc.weight; this is not an EAGLE-3 or P-EAGLE head")
    fc_shape = checkpoint.info(locate("fc.weight")).shape
    if len(fc_shape) != 2:
        raise CheckpointError(f"{where}: fc.weight has shape {fc_shape}, not two dimensions")
    config = drafter_config(folder, target, tensors, fc_shape[1])
    first = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    head = nnx.eval_shape(lambda: DraftHead(config, dtype=dtype, rngs=nnx.Rngs(0)))
    rules = head_rules(config, first)
    read = lambda name: checkpoint.read(locate(name))
    _fill(head, rules, read, dtype, where)
    d2t = _load_d2t(read, tensors, config, where)
    if d2t is not None:
        head.d2t.set_value(jnp.asarray(d2t))
    _refuse_unused(checkpoint, rules, ("d2t", "t2d"), prefix, "the head")
    return head


def _split(module, rules: list[Rule], dtype: str) -> dict[str, np.ndarray]:
    params = dict(nnx.to_flat_state(nnx.state(module)))
    out = {}
    for rule in rules:
        array = np.asarray(jax.device_get(params[rule.path].get_value())).astype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        )
        edges = np.cumsum(rule.sizes)[:-1] if rule.sizes else []
        out |= dict(zip(rule.names, np.split(array, edges, axis=0), strict=True))
    return out


def _write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write(folder / "model.safetensors", tensors)


def save_target(model: Dense, folder: str | Path, *, dtype: str = "bfloat16") -> None:
    """Writes `config.json` and `model.safetensors` under their Hugging Face names."""
    tensors = _split(model, target_rules(model.config), dtype)
    _write_folder(Path(folder), target_json(model.config, dtype), tensors)


def save_head(
    head: DraftHead, folder: str | Path, *, max_position: int, dtype: str = "bfloat16"
) -> None:
    """Writes a head in the AWS layout (P-EAGLE) or the SafeAILab layout (EAGLE-3): `midlayer.*`.

    `d2t` (int64 offsets) and `t2d` (bool) are always written, as those files have them.
    """
    config = head.config
    tensors = _split(head, head_rules(config, "midlayer"), dtype)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    Vd = config.draft_vocab_size
    d2t = np.zeros(Vd, np.int64) if head.d2t is None else np.asarray(head.d2t[...], np.int64)
    t2d = np.zeros(config.vocab_size, bool)
    t2d[np.arange(Vd) + d2t] = True
    tensors |= {"d2t": d2t, "t2d": t2d}
    _write_folder(Path(folder), head_json(config, max_position, dtype), tensors)
