"""Loads and saves models.

`streaming` reads the weights in several threads. Quantised weights keep their format.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import column_tiles, dispatch
from peagle_jax.checkpoint.assembly import (
    FileAssembly,
    Sharing,
    stored_dtype,
)
from peagle_jax.checkpoint.block_json import block_head_json, block_speculators_json
from peagle_jax.checkpoint.checked import checked_head, checked_target, naming
from peagle_jax.checkpoint.converted import Converted, joined, open_checkpoint
from peagle_jax.checkpoint.fields import named, read_config
from peagle_jax.checkpoint.head_json import head_json, head_unread_keys, speculators_json
from peagle_jax.checkpoint.layout import FP8, Layout, Rule
from peagle_jax.checkpoint.lora import Adapter
from peagle_jax.checkpoint.safetensors import (
    Checkpoint,
    CheckpointError,
    NamedArrays,
    TensorInfo,
    write,
)
from peagle_jax.checkpoint.streaming import stream
from peagle_jax.checkpoint.tables import (
    as_tied,
    head_layout,
    head_tensors,
    target_layout,
    target_tensors,
)
from peagle_jax.checkpoint.target_json import target_unread_keys
from peagle_jax.checkpoint.target_writer import target_json
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.devices import ONE_DEVICE, Devices, local_modules
from peagle_jax.method.block_head import make_head
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder, build, weight_order
from peagle_jax.models.quant import quantize_fp8
from peagle_jax.parallel.shares import check_shares

_log = logging.getLogger(__name__)
Quantization = Literal["fp8"]
_QUANTIZABLE = ("qkv", "out", "gate_up", "down")
"""Modules whose weight `quantization` applies to: all matrices but embed, router, lm_head and
fc."""


def _owner(module: nnx.Module, rule: Rule) -> nnx.Module:
    for part in rule.path[:-1]:
        module = module[part] if isinstance(part, int) else getattr(module, part)
    return module


def _fill(
    module: nnx.Module,
    layout: Layout,
    checkpoint: Checkpoint | Converted | NamedArrays,
    dtype: str,
    quantization: Quantization | None,
    devices: Devices,
    adapter: Adapter | None = None,
) -> None:
    """Replaces the abstract parameters of `module` by a checkpoint's tensors."""
    if devices.count > 1:
        check_shares(module.config, devices.count)
        local_modules(module, module.config, devices.count)
    params = dict(nnx.to_flat_state(nnx.state(module)))

    def keep(rule: Rule, value: jax.Array) -> jax.Array:
        if rule.path[-1] == "scale":
            _owner(module, rule).scale = nnx.Param(value)
        else:
            params[rule.path].set_value(value)
        return value

    if quantization or adapter is not None or not isinstance(checkpoint, Checkpoint):
        rules = (dtype, quantization, adapter)
        _fill_joined(module.config, layout, checkpoint, *rules, devices, keep)
        return

    def put(assembly: FileAssembly) -> jax.Array:
        shares, cut = assembly.shares, assembly.sharing.cut
        if cut is not None:
            value = devices.assembled(assembly.shape, assembly.dtype, cut, shares.__getitem__)
        elif devices.count > 1:
            value = devices.put(shares[0], None)
        else:
            value = jax.device_put(shares[0])  # `jnp.asarray` would copy on this thread
        return keep(assembly.rule, value)

    assemblies = _assemblies(module.config, layout, checkpoint, dtype, devices)
    stream(assemblies, put, is_copied=dispatch.platform() != "cpu")


def _assemblies(
    config: TargetConfig | DrafterConfig,
    layout: Layout,
    checkpoint: Checkpoint,
    dtype: str,
    devices: Devices,
) -> list[FileAssembly]:
    """One for each parameter."""
    shapes = {rule.path: _shape(rule, checkpoint) for rule in layout.rules}
    found = []
    for rule in layout.rules:
        shape = shapes[rule.path]
        weight = shapes.get((*rule.path[:-1], "weight"), shape)
        cut = devices.cut_of(config, rule.path, shape, weight)
        stored = checkpoint.tensors[rule.names[0]].dtype
        sharing = Sharing(cut, range(devices.count), devices.count)
        made = stored_dtype(stored, rule.path[-1], dtype)
        found.append(FileAssembly(checkpoint, rule, made, sharing))
    return found


def _shape(rule: Rule, checkpoint: Checkpoint | Converted) -> tuple[int, ...]:
    """Of the parameter that a rule makes, as the checkpoint stores it."""
    return rule.transform.shape([checkpoint.tensors[name].shape for name in rule.names])


def _fill_joined(
    config: TargetConfig | DrafterConfig,
    layout: Layout,
    checkpoint: Checkpoint | Converted,
    dtype: str,
    quantization: Quantization | None,
    adapter: Adapter | None,
    devices: Devices,
    keep: Callable[[Rule, jax.Array], jax.Array],
) -> None:
    """One whole parameter after the other; `quantization` makes fp8 of matrices, after `adapter` is
    merged.
    """

    def put(rule: Rule, array: np.ndarray, weight: tuple[int, ...]) -> None:
        # Cast in numpy: a cast on the device would need memory for two copies of the weight.
        cast = np.asarray(array, dtype=stored_dtype(array.dtype, rule.path[-1], dtype))
        keep(rule, devices.put(cast, devices.cut_of(config, rule.path, array.shape, weight)))

    shapes = {rule.path: _shape(rule, checkpoint) for rule in layout.rules}
    for rule in layout.rules:
        array = joined(checkpoint, rule)
        if adapter is not None:
            array = adapter.merged(rule, array, checkpoint.tensors)
        weight = (*rule.path[:-1], "weight")
        if not quantization or rule.path != weight or rule.path[-2] not in _QUANTIZABLE:
            put(rule, array, shapes.get(weight, array.shape))
            continue
        try:
            array, scale = quantize_fp8(array)
        except ValueError as error:
            raise CheckpointError(f"{'.'.join(map(str, rule.path))}: {error}") from error
        put(rule, array, array.shape)
        put(rule._replace(path=(*rule.path[:-1], "scale")), scale, array.shape)


def _name_unread_keys(folder: Path, unread_keys: Callable[[dict], list[str]]) -> None:
    if keys := unread_keys(read_config(folder)):
        _log.warning("%s: keys of config.json that change nothing: %s", folder, named(keys))


def load_target(
    folder: str | Path,
    *,
    dtype: str,
    quantization: Quantization | None = None,
    devices: Devices = ONE_DEVICE,
    lora: str | Path | None = None,
) -> Decoder:
    """Loads a target model from a Hugging Face folder, or from a folder written by
    `peagle-convert`.

    Args:
      folder: config.json and weights; FP8 and MXFP4 weights are kept as they are.
      dtype: of all that is not quantised.
      quantization: "fp8" quantises the matrices of attention, MLP and experts during loading.
      devices: share the model, and each is sent its share only; by default it lies on the default
        device.
      lora: folder of an adapter that is merged into the weights, see `lora.Adapter`.
    Raises:
      CheckpointError: the folder is no supported model, or tensors are missing, unused or
        misshapen, or `quantization` is given for a model that is quantised, or the adapter does not
        fit.
    """
    if quantization not in (None, "fp8"):
        raise CheckpointError(f"{quantization=} is not supported; 'fp8' is")
    folder = Path(folder)
    checkpoint = open_checkpoint(folder)
    config, layout = checked_target(folder, checkpoint)
    _name_unread_keys(folder, target_unread_keys)
    with naming(folder):
        layout.check(config.family)
        if quantization and layout.quantized:
            raise CheckpointError(
                "this checkpoint is quantised already; load it without "
                f"quantization={quantization!r}"
            )
        adapter = None if lora is None else Adapter(lora)
        if adapter is not None:
            adapter.fit(layout, checkpoint.tensors)
        model = nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0)))
        _fill(model, layout, checkpoint, dtype, quantization, devices, adapter)
    return model


def load_head(
    folder: str | Path,
    target: TargetConfig,
    *,
    dtype: str,
    taps: Sequence[int] | None = None,
    devices: Devices = ONE_DEVICE,
) -> DraftHead:
    """A P-EAGLE or EAGLE-3 head in the AWS, SafeAILab, SpecForge, NeMo or speculators layout, or a
    block drafter in that of z-lab, DeepSpec or speculators.

    Args:
      folder: config.json and safetensors, or a converted head.
      target: the model that the head will draft for.
      dtype: of all weights.
      taps: tap ids that override those of config.json (`head_json` describes how these are read).
      devices: as in `load_target`.
    Raises:
      CheckpointError: the head is broken or does not fit `target`.
    """
    folder = Path(folder)
    checkpoint = open_checkpoint(folder)
    config, layout = checked_head(folder, checkpoint, target, taps)
    is_block = config.block is not None
    _name_unread_keys(folder, lambda raw: head_unread_keys(raw, is_block=is_block))
    with naming(folder):
        layout.check("the head")
        head = nnx.eval_shape(lambda: make_head(config, dtype=dtype, rngs=nnx.Rngs(0)))
        _fill(head, layout, checkpoint, dtype, None, devices)
    return head


def load_like(
    source: str | Path | Iterable[tuple[str, Any]],
    like: Decoder | DraftHead,
    target: TargetConfig,
    devices: Devices = ONE_DEVICE,
) -> Decoder | DraftHead:
    """Another model of the class of `like`, of its dtype, quantised if it is.

    Args:
      source: a folder as of `load_target` and `load_head`, or arrays with the names of its tensors.
      target: of which `like` is the model or a head.
      devices: as in `load_target`.
    Raises:
      CheckpointError: as of `load_target` and `load_head`.
    """
    is_target = isinstance(like, Decoder)
    if isinstance(source, str | Path):
        folder = Path(source)
        checkpoint = open_checkpoint(folder)
        if is_target:
            config, layout = checked_target(folder, checkpoint)
        else:
            config, layout = checked_head(folder, checkpoint, target, like.config.taps or None)
    else:
        checkpoint = NamedArrays(source)
        config = as_tied(like.config, checkpoint) if is_target else like.config
        layout = (target_layout if is_target else head_layout)(config, checkpoint.tensors)
    layout.check("the engine's model")
    dtype, is_fp8 = like.norm.weight.dtype, any(x.dtype == FP8 for x in jax.tree.leaves(like))
    make = build if is_target else make_head
    model = nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
    quantization = "fp8" if is_fp8 and not layout.quantized else None
    _fill(model, layout, checkpoint, dtype, quantization, devices)
    return model


def _tensors_of(
    module: nnx.Module, layout: Layout, like: dict[str, TensorInfo]
) -> dict[str, np.ndarray]:
    params, out = dict(nnx.to_flat_state(nnx.state(module))), {}
    if any(path[-1] == "scale" for path in params):
        raise CheckpointError("a quantised model cannot be saved; save the one it was made from")
    tiled = weight_order.in_columns(module)
    for rule in layout.rules:
        values = params[rule.path].get_value()
        values = column_tiles.restore(values) if rule.path in tiled else values
        array = np.asarray(jax.device_get(values))
        parts = rule.transform.split(array, [like[name] for name in rule.names])
        out |= dict(zip(rule.names, parts, strict=True))
    return {name: out[name] for name in like}


def _write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write(folder / "model.safetensors", tensors)


def save_target(model: Decoder, folder: str | Path, *, dtype: str = "bfloat16") -> None:
    """Writes `config.json` and `model.safetensors` under their Hugging Face names, unquantised."""
    like = target_tensors(model.config, jnp.dtype(dtype))
    tensors = _tensors_of(model, target_layout(model.config, like), like)
    _write_folder(Path(folder), target_json(model.config, dtype), tensors)


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    max_position: int,
    dtype: str = "bfloat16",
    selector: bool = True,
) -> None:
    """Writes a head in the AWS layout (P-EAGLE) or the SafeAILab layout (EAGLE-3): `midlayer.*`; a
    block drafter in the layout of z-lab, with a Markov head in that of DeepSpec.

    `d2t` (int64 offsets) and `t2d` (bool) are written with the first two, as those files have them,
    and of a block drafter with a pruned vocabulary. `selector` False leaves the head's selector
    out, which other programs do not support.
    """
    config = head.config if selector else replace(head.config, selector_rank=0)
    tensors = _head_arrays(head, config, head_tensors(config, jnp.dtype(dtype)))
    made = head_json if config.block is None else block_head_json
    _write_folder(Path(folder), made(config, max_position, dtype), tensors)


def save_speculators_head(
    head: DraftHead, folder: str | Path, target: TargetConfig, *, dtype: str = "bfloat16"
) -> None:
    """Writes a head for `target` in the layout of speculators, without its selector."""
    config = replace(head.config, selector_rank=0)
    tensors = _head_arrays(head, config, head_tensors(config, jnp.dtype(dtype), "layers.0"))
    made = speculators_json if config.block is None else block_speculators_json
    _write_folder(Path(folder), made(config, target, dtype), tensors)


def _head_arrays(
    head: DraftHead, config: DrafterConfig, like: dict[str, TensorInfo]
) -> dict[str, np.ndarray]:
    """The tensors named in `like`, `d2t` and `t2d`."""
    tensors = _tensors_of(head, head_layout(config, like), like)
    if head.d2t is None and config.block is not None:
        return tensors
    d2t = tensors.setdefault("d2t", np.zeros(config.draft_vocab_size, np.int64))
    tensors["t2d"] = np.zeros(config.vocab_size, bool)
    tensors["t2d"][np.arange(len(d2t)) + d2t] = True
    return tensors
