"""The order of weights in memory: rows, as in checkpoints, or tiles (`fp8_tiles`, `column_tiles`).

Hopper's kernels read tiles of FP8 weights with fewer instructions, if activations are not
quantised. Quantised activations, other chips and the references of a CPU read rows. No number
changes, and no sum. A CPU reads float32 weights in tiles of columns; sums may have another order.
"""

import itertools
import logging
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import column_tiles, dispatch, formats, fp8_tiles
from pallas_kernels.block_gemm.api import TILES_CHIPS
from peagle_jax.cores import num_cores
from peagle_jax.models.decoder import Decoder
from peagle_jax.models.layers import Embed, Linear

MOST_CORES = 4
"""Cores of a CPU that reads columns: XLA divides a product with rows between all cores, and most of
those with columns not (lab/log.md)."""

_log = logging.getLogger(__name__)


def order_weights(model: nnx.Module, activations: str) -> None:
    """Brings the fp8 weights of `model` into the order that products read on this device.

    The replaced arrays are deleted: a model that shares them must not be used after this.

    Args:
      activations: as in `EngineConfig`.
    """
    reads_tiles = activations == "bf16" and dispatch.device().sm in TILES_CHIPS
    arrange_weights(model, in_tiles=reads_tiles, frees=True)


def arrange_weights(model: nnx.Module, *, in_tiles: bool, frees: bool = False) -> None:
    """Replaces the fp8 weights of `model` that have the other order, or their shapes.

    Weights of which a device's share is not whole tiles stay in rows. The device holds `model` and,
    for a moment, one weight twice.

    Args:
      frees: delete each replaced array at once, even if others refer to it. Otherwise it lives as
        long as its last reference. A server that collects no garbage yet held the weights twice.
    """
    started, count = time.perf_counter(), 0
    for module, (values, scale) in quantized_weights(model):
        kind = formats.kind(values, scale)
        if in_tiles and kind == "fp8" and fp8_tiles.fits(*_share(values)[-2:]):
            convert = fp8_tiles.arrange
        elif kind == "fp8_tiles" and not in_tiles:
            convert = fp8_tiles.restore
        else:
            continue
        module.weight = nnx.Param(_converted(convert, values))
        if frees and isinstance(values, jax.Array):
            values.delete()
        count += 1
    if count:
        order = "tiles" if in_tiles else "rows"
        _log.info("%d fp8 weights in %s in %.1f s", count, order, time.perf_counter() - started)


def tile_columns(*models: nnx.Module | None) -> None:
    """Brings the float32 weights of targets and heads into `column_tiles`, on a CPU of few cores.

    For an engine: other readers of weights expect rows. The replaced arrays are deleted, as by
    `order_weights`.
    """
    if dispatch.platform() != "cpu" or num_cores() > MOST_CORES:
        return
    for module in itertools.chain(*map(_multiplied, filter(None, models))):
        values = module.weight.get_value()
        is_shared = isinstance(values.sharding, NamedSharding)
        if values.dtype == jnp.float32 and column_tiles.fits(len(values)) and not is_shared:
            module.weight = nnx.Param(_converted(column_tiles.arrange, values))
            values.delete()


def in_columns(model: nnx.Module) -> set[tuple[str | int, ...]]:
    """Paths of the weights that are in `column_tiles`."""
    return {(*path, "weight") for path, _ in _tiled(model)}


def in_rows[Model: nnx.Module](model: Model) -> Model:
    """The model with rows in place of `column_tiles`, as training reads it; it shares the other
    arrays."""
    model = jax.tree.map(lambda leaf: leaf, model)
    for _, module in _tiled(model):
        module.weight = nnx.Param(column_tiles.restore(module.weight.get_value()))
    return model


def _tiled(model: nnx.Module) -> Iterator[tuple[tuple[str | int, ...], nnx.Module]]:
    """The paths and modules of the weights in `column_tiles`."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Embed) and module.weight.ndim == 3:
            yield path, module


def _multiplied(model: nnx.Module) -> Iterator[nnx.Module]:
    """The modules whose weights [N, K] are read by `linear`, and by `Embed`, only."""
    is_tied = isinstance(model, Decoder) and model.lm_head is None
    for path, module in nnx.iter_modules(model):
        is_read = path[-1:] == ("router",) or path[-2:] == ("selector", "out")
        is_product = isinstance(module, Linear) and module.scale is None and not is_read
        if (is_product or (is_tied and isinstance(module, Embed))) and module.weight.ndim == 2:
            yield module


def ordered_as(values: jax.Array, like: jax.Array) -> jax.Array:
    """A weight in the order that `like` has; an array of as many axes as it is."""
    if values.ndim == like.ndim:
        return values
    tiles = fp8_tiles if values.dtype == jnp.float8_e4m3fn else column_tiles
    return _converted(tiles.arrange if values.ndim < like.ndim else tiles.restore, values)


def quantized_weights(
    model: nnx.Module,
) -> Iterator[tuple[nnx.Module, tuple[jax.Array, jax.Array]]]:
    """The modules of `model` that have a quantised weight, each with its values and scale."""
    for _, module in nnx.iter_modules(model):
        if getattr(module, "scale", None) is not None and hasattr(module, "weight"):
            yield module, (module.weight.get_value(), module.scale.get_value())


def _share(values: jax.Array) -> tuple[int, ...]:
    """The shape of what one device holds of an array."""
    shared = isinstance(values.sharding, NamedSharding)
    return values.sharding.shard_shape(values.shape) if shared else values.shape


def _converted(convert, values: jax.Array) -> jax.Array:
    """`convert(values)` with the shares of `values`: the axes of rows and columns stay."""
    sharding = values.sharding
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * (len(values.shape) - len(sharding.spec))]
        spec = [*spec, None] if convert is fp8_tiles.arrange else spec[:-1]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    if isinstance(values, jax.ShapeDtypeStruct):
        shape = jax.eval_shape(convert, values).shape
        return jax.ShapeDtypeStruct(shape, values.dtype, sharding=sharding)
    return jax.block_until_ready(jax.jit(convert, out_shardings=sharding)(values))
