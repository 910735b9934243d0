"""Weights that come to an engine that runs: checked leaf by leaf, and placed as its own are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

from pallas_kernels import dispatch, formats
from peagle_jax.checkpoint.gguf_file import is_gguf
from peagle_jax.checkpoint.hub import resolve
from peagle_jax.checkpoint.layout import FLOATS, FP8, PACKED
from peagle_jax.checkpoint.loader import load_like
from peagle_jax.checkpoint.safetensors import is_deleted
from peagle_jax.checkpoint.values import MXFP4_NAN
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.devices import Devices
from peagle_jax.method.block_head import make_head
from peagle_jax.models import build
from peagle_jax.models.quant import fp8_scale, fp8_values, quantize_fp8

Weights = nnx.Module | Mapping | str | Path | Iterable[tuple[str, Any]]
"""A model: a module, a pytree of its parameters (`nnx.state` of it, or dicts of arrays with the
same names), a folder, or arrays with their Hugging Face names."""


def is_stored(weights: Weights) -> bool:
    """Whether they have the names of a checkpoint: a folder, or arrays with Hugging Face names."""
    if isinstance(weights, Mapping):
        return all(hasattr(array, "shape") for array in weights.values())
    return not isinstance(weights, nnx.Module) and isinstance(weights, Iterable | Path)


def host() -> jax.Device:
    """The processor, or the default device where jax has none, as with JAX_PLATFORMS=cuda."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return dispatch.default_device()


def loaded(weights: Weights, like: nnx.Module, target: TargetConfig) -> nnx.Module:
    """The model of weights that are stored, in memory of the host: a device may have room for one
    model. Nothing is downloaded.

    Args:
      like, target: as of `loader.load_like`, which says what is raised; shapes are enough.
    """
    if isinstance(weights, Mapping):
        weights = weights.items()
    elif isinstance(weights, str | Path) and is_gguf(weights):
        weights = resolve(str(weights))[0]
    with jax.default_device(host()):
        return load_like(weights, like, target)


def checked(weights: Weights, like: nnx.Module, devices: Devices) -> dict[str, Any]:
    """The arrays by name, where the caller has them; those of the host as numpy's.

    What comes unquantised for an FP8 weight is quantised as in loading: arrays of the host there,
    others where they lie. Of those the scale is there, and `placements` makes the values.

    Args:
      weights: a module or a pytree.
      like: the engine's model, or its shapes.

    Raises:
      ConfigError: one line for each leaf that is missing, unknown, misshapen, of another dtype or
        not finite, and for each setting in which a module's config differs.
    """
    found, own = by_name(weights), by_name(like)
    if "" in found:  # it is a leaf itself
        kind = type(weights).__name__
        raise ConfigError(
            f"a {kind} is no model: give a module, a pytree, a folder or named arrays"
        )
    found = {name: _of_host(value) for name, value in found.items()}
    is_module = isinstance(weights, nnx.Module)
    is_placed = is_module and devices.mesh is not None and _is_on(found, devices)
    problems = _other_settings(getattr(weights, "config", None), like.config) if is_module else []
    accepted = _accepted(own, like.config, devices, is_placed=is_placed)
    problems += _differences(found, own, accepted)
    if problems:
        raise ConfigError("\n".join(["the weights do not fit the engine:", *problems]))
    for name, value in tuple(found.items()):
        scale = _scale_of(name)
        if scale in own and scale not in found:
            if isinstance(value, jax.Array):
                found[scale] = fp8_scale(value)
            else:
                found[name], found[scale] = quantize_fp8(np.asarray(value))
    return found


def placements(found: dict[str, Any], like: nnx.Module, devices: Devices) -> dict[str, Callable]:
    """For each array of `checked` a function that puts it where the engine's own lies, each
    device's share on that device. An array that lies there stays the caller's own."""
    made = {}
    for path, _ in nnx.to_flat_state(nnx.state(like)):
        name = ".".join(map(str, path))
        weight = found.get(f"{name.removesuffix('scale')}weight", found[name])
        sizes = (like.config, path, found[name].shape, weight.shape)
        is_unquantised = _scale_of(name) in found and weight.dtype in FLOATS
        # A copy: what is donated is deleted, and scales come before their weights.
        scale = jnp.copy(found[_scale_of(name)]) if is_unquantised else None
        made[name] = partial(_placed, scale=scale, devices=devices, sizes=sizes)
    return made


def _placed(value, scale, devices: Devices, sizes: tuple):
    if scale is not None:
        value = fp8_values(value, scale)
    if devices.mesh is None:
        return _moved(value, devices)
    if _is_on({"": value}, devices):
        return value
    return devices.put(_moved(value, devices), devices.cut_of(*sizes))


def _of_host(value):
    """Arrays of jax that lie in the host's memory, beside a device, as numpy's: jax would send them
    to the device whole to compute with them."""
    if dispatch.platform() == "cpu" or not isinstance(value, jax.Array):
        return value
    is_there = all(device.platform == "cpu" for device in value.devices())
    return np.asarray(value) if is_there else value


def by_name(tree) -> dict[str, Any]:
    """The arrays of a module or of a pytree, as `{"layers.0.mlp.down.weight": ...}`."""
    is_variable = lambda node: isinstance(node, nnx.Variable)
    return {
        keystr(path, simple=True, separator="."): leaf.get_value() if is_variable(leaf) else leaf
        for path, leaf in tree_leaves_with_path(tree, is_leaf=is_variable)
    }


def _scale_of(name: str) -> str:
    """The name of the scale of a weight, were it quantised; of another array no name at all."""
    return f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else ""


def _kinds(own: dict[str, Any]) -> dict[str, formats.Kind]:
    """The formats of the quantised weights."""
    scales = {name: _scale_of(name) for name in own}
    return {
        name: formats.kind(own[name], own[scale]) for name, scale in scales.items() if scale in own
    }


def _is_on(found: dict[str, Any], devices: Devices) -> bool:
    """Whether the arrays of a module are the shares of these devices."""
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in found.values())
    return any(mesh == devices.mesh for mesh in meshes)


def _other_settings(config, own: TargetConfig | DrafterConfig) -> list[str]:
    if type(config) is not type(own):
        return [f"the module is no model with a {type(own).__name__}"]
    pairs = ((f.name, getattr(config, f.name), getattr(own, f.name)) for f in fields(own))
    return [f"config.{name}: {one!r}, not {two!r}" for name, one, two in pairs if one != two]


class _Spec(NamedTuple):
    """What an array must be."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, array) -> "_Spec":
        return cls(tuple(array.shape), np.dtype(array.dtype))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@cache
def _whole_shapes(config: TargetConfig | DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all unquantised parameters, before they are shared."""
    make = build if isinstance(config, TargetConfig) else make_head
    model = nnx.eval_shape(lambda: make(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return {name: leaf.shape for name, leaf in by_name(model).items()}


def _accepted(
    own: dict[str, Any],
    config: TargetConfig | DrafterConfig,
    devices: Devices,
    *,
    is_placed: bool,
) -> dict[str, list[_Spec]]:
    """What each array may be: as checkpoints store it, or as the engine has it.

    Args:
      is_placed: whether shares come; else an engine on several devices takes whole arrays only.
    """
    if is_placed:
        return {name: [_Spec.of(array)] for name, array in own.items()}
    is_whole, kinds = devices.mesh is None, _kinds(own)
    accepted = {}
    for name, array in own.items():
        if name in kinds:
            scale = own[_scale_of(name)]
            logical = formats.logical_shape(array, scale)
            shape = logical if is_whole else _whole_shapes(config)[name]
            values, scales = _stored(shape, kinds[name], scale, logical)
            accepted[_scale_of(name)] = [scales]
            accepted[name] = [values, *[_Spec.of(array)] * is_whole]
        elif name not in map(_scale_of, kinds):
            whole = _whole_shapes(config).get(name, array.shape)
            is_tiled = len(whole) != len(array.shape)  # `column_tiles`
            shape = array.shape if is_whole and not is_tiled else whole
            specs = [_Spec(tuple(shape), np.dtype(array.dtype)), _Spec.of(array)]
            accepted[name] = specs[: 1 + is_tiled]
    return accepted


def _stored(
    shape: tuple[int, ...], kind: formats.Kind, scale: jax.Array, logical: tuple[int, ...]
) -> tuple[_Spec, _Spec]:
    """Values and scales of a weight [..., N, K] in a checkpoint.

    Args:
      scale: the engine's, over the weight `logical`.
    """
    *leading, N, K = shape
    if kind == "mxfp4":
        groups = K // formats.GROUP
        return _Spec((*leading, N, K // 2), PACKED), _Spec((*leading, N, groups), PACKED)
    rows = N if scale.shape[-2] == logical[-2] else -(-N // formats.BLOCK)
    columns = 1 if scale.shape[-1] == 1 else -(-K // formats.BLOCK)
    return _Spec(tuple(shape), FP8), _Spec((*leading, rows, columns), np.dtype(np.float32))


def _is_in_blocks(values: _Spec, scale: _Spec) -> bool:
    """Whether the scales are those of `quantize_fp8`, and not one for each row."""
    return scale.shape[-2:] == tuple(-(-size // formats.BLOCK) for size in values.shape[-2:])


def _differences(
    found: dict[str, Any], own: dict[str, Any], accepted: dict[str, list[_Spec]]
) -> list[str]:
    """A line for each leaf that differs, by name."""
    lines, sound = dict.fromkeys(found.keys() - own.keys(), "unknown"), {}
    for name, (spec, *others) in accepted.items():
        if name not in found:
            lines[name] = "missing"
            continue
        if not hasattr(found[name], "dtype"):
            lines[name] = f"a {type(found[name]).__name__}, not an array"
            continue
        if is_deleted(found[name]):
            lines[name] = "deleted, as by donation"
            continue
        scale, given = _scale_of(name), _Spec.of(found[name])
        is_unquantised = scale in own and scale not in found and given.dtype in FLOATS
        if is_unquantised and spec.dtype == FP8 and _is_in_blocks(spec, *accepted[scale]):
            lines.pop(scale, None)
            spec = spec._replace(dtype=given.dtype)
        if given not in (spec, *others):
            lines[name] = f"{given}, not {spec}"
        else:
            is_at_host = isinstance(found[name], np.ndarray)
            place = host() if is_at_host else dispatch.default_device()
            with jax.default_device(place):
                sound[name] = _is_sound(found[name], is_scale=name.endswith(".scale"))
    lines |= {
        name: "not finite" for name, is_sound in jax.device_get(sound).items() if not is_sound
    }
    return [f"{name}: {line}" for name, line in sorted(lines.items())]


@partial(jax.jit, static_argnames="is_scale")
def _is_sound(array: jax.Array, *, is_scale: bool) -> jax.Array:
    """Whether all numbers are finite, and scales positive; of integers only MXFP4's scales may not
    be."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.all(array != MXFP4_NAN) if is_scale else jnp.array(True)
    return jnp.all(jnp.isfinite(array) & ((array > 0) | (not is_scale)))


def _moved(value, devices: Devices):
    """An array where `Devices.placed` expects it: whole, and on one device."""
    if devices.mesh is None:
        place = dispatch.default_device()
        is_there = isinstance(value, jax.Array) and value.devices() == {place}
        return value if is_there else jax.device_put(value, place)
    is_shared = isinstance(value, jax.Array) and len(value.devices()) > 1
    return jax.device_put(value, devices.mesh.devices[0]) if is_shared else value
