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
    read_json,
    target_config,
    target_json,
)
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, write
from peagle_jax.checkpoint.tables import Rule, head_rules, target_rules
from peagle_jax.config import TargetConfig
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


def _fill(abstract, rules: list[Rule], read, dtype, where: str):
    """Replaces every abstract parameter by checkpoint tensors; shapes must agree exactly."""
    state = nnx.state(abstract)
    params = dict(nnx.to_flat_state(state))
    for rule in rules:
        variable = params.pop(rule.path)
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
    return params


def _unused(
    checkpoint: Checkpoint, rules: list[Rule], prefix: str, also: tuple[str, ...]
) -> list[str]:
    used = {prefix + name for rule in rules for name in rule.names} | {prefix + n for n in also}
    return [
        name
        for name in checkpoint.names()
        if name not in used and not name.endswith(_TRAINING_ONLY)
    ]


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
    unused = _unused(checkpoint, rules, "", also)
    if unused:
        raise CheckpointError(f"{folder}: tensors without a place in {config.family}: {unused[:5]}")
    return model


def _load_d2t(
    checkpoint: Checkpoint, name: str, draft_vocab: int, vocab: int, where: str
) -> np.ndarray:
    """Offsets [Vd]: target id = draft id + d2t. Refuses absolute ids, which some trainers write."""
    if name not in checkpoint:
        raise CheckpointError(
            f"{where}: the draft vocabulary has {draft_vocab} of {vocab} tokens but there is no d2t"
        )
    d2t = checkpoint.read(name).reshape(-1)
    ids = np.arange(len(d2t)) + d2t
    if len(d2t) != draft_vocab or np.any(np.diff(ids) <= 0) or ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(
            f"{where}: d2t must hold {draft_vocab} offsets to ascending target ids below {vocab}; "
            "absolute ids need 'd2t - arange(len(d2t))'"
        )
    return d2t.astype(np.int32)


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
    raw = read_json(folder)
    states_mask = any(
        raw.get(k) is not None for k in ("mask_token_id", "pard_token", "ptd_token_id")
    )
    if states_mask and "mask_hidden" not in tensors:
        raise CheckpointError(
            f"{where}: config.json names a mask token but the file holds no mask_hidden; "
            "the head cannot draft in parallel"
        )
    fused_width = checkpoint.info(locate("fc.weight")).shape[1]
    config = drafter_config(folder, target, tensors, fused_width)
    first = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    head = nnx.eval_shape(lambda: DraftHead(config, dtype=dtype, rngs=nnx.Rngs(0)))
    rules = head_rules(config, first)
    left = _fill(head, rules, lambda name: checkpoint.read(locate(name)), dtype, where)
    for path, variable in left.items():  # d2t is all that no rule fills
        d2t = _load_d2t(
            checkpoint, locate(path[-1]), config.draft_vocab_size, target.vocab_size, where
        )
        variable.set_value(jnp.asarray(d2t))
    also = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")
    unused = [n for n in _unused(checkpoint, rules, prefix, also) if n not in also]
    unused = [n for n in unused if n not in {name for rule in rules for name in rule.names}]
    if unused:
        raise CheckpointError(f"{where}: tensors without a place in the head: {unused[:5]}")
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
