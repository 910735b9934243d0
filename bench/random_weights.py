"""Full-size models with random weights, generated on the device: no files, no host-to-device
copies.

Modules are built abstractly, and a small program per shape and format generates each parameter, so
peak memory is little more than the weights. Norms are ones and matrices have the standard deviation
of `build`, so activations stay in the range of a real model; the output is meaningless.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from bench.presets import Format
from pallas_kernels.formats import BLOCK, GROUP
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.devices import ONE_DEVICE, Devices, local_modules
from peagle_jax.method.block_head import make_head
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder, build
from peagle_jax.models.layers import INIT_STD
from peagle_jax.parallel.shares import check_shares

QUANTISED = {"qkv", "out", "gate_up", "down"}
"""Modules whose matrices a quantised checkpoint quantises."""
FP8_SPREAD = 100.0
"""Standard deviation of fp8 values: the largest of a block of normals (4.2 of them) is near 448."""
_FP8_MAX = 448.0
_MXFP4_RMS = math.sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)
_SMALL = 0.01  # biases and sinks
_LARGE, _PARTS = 1 << 26, 16  # a matrix of more than _LARGE elements is drawn in _PARTS parts

Path = tuple[str | int, ...]


def random_target(
    config: TargetConfig, form: Format, *, dtype: str, seed: int = 0, devices: Devices = ONE_DEVICE
) -> Decoder:
    """A target whose matrices have the format `form`, as in the released checkpoints.

    fp8: all matrices of attention, MLP and experts, never the router, embedding or output; mxfp4:
    experts only.

    Args:
      dtype: of unquantised parameters.
      devices: share each parameter as soon as it is made.
    Raises:
      ConfigError: mxfp4 for a model without experts, or a width that is not a multiple of the group
        size.
    """
    model = nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0)))
    narrow = INIT_STD / math.sqrt(2 * config.num_layers)

    def spread(path: Path) -> float:
        if path[-2] == "embed" and not config.tie_embeddings:
            # Rows of one sequence attend to nearly the same keys. Only the embedding of its token
            # makes a row choose experts of its own.
            return 1.0
        return narrow if path[-2] in ("out", "down") else INIT_STD

    _fill(model, form, spread, seed, devices)
    return model


def random_head(
    config: DrafterConfig, *, dtype: str, seed: int = 1, devices: Devices = ONE_DEVICE
) -> DraftHead:
    """A head in `dtype`, shared by `devices`; its draft tokens are spread evenly over the
    vocabulary."""
    head = nnx.eval_shape(lambda: make_head(config, dtype=dtype, rngs=nnx.Rngs(0)))
    _fill(head, "bf16", lambda path: INIT_STD, seed, devices)
    if head.d2t is not None:
        offsets = _offsets(config.draft_vocab_size, config.vocab_size)
        head.d2t.set_value(devices.copied(offsets))
    return head


def num_bytes(*modules: nnx.Module) -> int:
    """Bytes that the modules' arrays hold."""
    return sum(leaf.nbytes for module in modules for leaf in jax.tree.leaves(nnx.state(module)))


def _fill(
    module: nnx.Module, form: Format, spread: Callable[[Path], float], seed: int, devices: Devices
) -> None:
    """Replaces the abstract parameters of `module` by random ones; quantised ones get a scale."""
    if devices.count > 1:
        check_shares(module.config, devices.count)
        local_modules(module, module.config, devices.count)
    for path, param in _parameters(module):
        name, shape, dtype = path[-1], param.shape, param.dtype
        key = _key(seed, path)

        def put(value, path=path, shape=shape) -> jax.Array:
            return devices.put(value, devices.cut_of(module.config, path, value.shape, shape))

        if jnp.issubdtype(dtype, jnp.integer):
            param.set_value(put(jnp.zeros(shape, dtype)))
        elif name == "mask_hidden":
            param.set_value(put(_normal(key, 1.0, shape, dtype)))
        elif name in ("bias", "sinks"):
            param.set_value(put(_normal(key, _SMALL, shape, dtype)))
        elif len(shape) == 1:  # norms and scalars
            param.set_value(put(_ones(shape, dtype)))
        elif not _is_quantised(form, path, shape):
            param.set_value(put(_normal(key, spread(path), shape, dtype)))
        else:
            values, scale = _QUANTISERS[form](key, spread(path), shape)
            param.set_value(put(values))
            scale = put(scale, (*path[:-1], "scale"))
            _owner(module, path).scale = nnx.Param(scale)


def _parameters(module: nnx.Module) -> Iterator[tuple[Path, nnx.Variable]]:
    # A list: filling adds scales to the module.
    yield from list(dict(nnx.to_flat_state(nnx.state(module))).items())


def _owner(module: nnx.Module, path: Path) -> nnx.Module:
    for part in path[:-1]:
        module = module[part] if isinstance(part, int) else getattr(module, part)
    return module


def _is_quantised(form: Format, path: Path, shape: tuple[int, ...]) -> bool:
    if path[-1] != "weight" or path[-2] not in QUANTISED:
        return False
    return form == "fp8" or (form == "mxfp4" and len(shape) > 2)


def _key(seed: int, path: Path) -> jax.Array:
    """One key per parameter, derived from its path, so that the order of filling does not
    matter."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(map(str, path)).encode()))


def _in_parts(
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array], key: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """`draw(key, shape)`, an expert or a sixteenth of a large matrix at a time.

    Random bits need several times the memory of the values made from them.
    """
    parts = shape[0] if len(shape) > 2 else 1
    if len(shape) == 2 and math.prod(shape) > _LARGE and shape[0] % _PARTS == 0:
        parts = _PARTS
    if parts == 1:
        return draw(key, shape)
    inner = (shape[0] // parts, *shape[1:])
    return jax.lax.map(lambda one: draw(one, inner), jax.random.split(key, parts)).reshape(shape)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, std: float, shape: tuple[int, ...], dtype) -> jax.Array:
    draw = lambda key, shape: (std * jax.random.normal(key, shape)).astype(dtype)
    return _in_parts(draw, key, shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ones(shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.ones(shape, dtype)


@functools.partial(jax.jit, static_argnums=2)
def _fp8(key: jax.Array, std: float, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """values e4m3 [..., N, K] and scale float32 [..., ceil(N / 128), ceil(K / 128)], equal within
    10 %."""
    *leading, N, K = shape
    of_values, of_scale = jax.random.split(key)

    def draw(key, shape):
        values = FP8_SPREAD * jax.random.normal(key, shape)
        return jnp.clip(values, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn)

    blocks = (*leading, -(-N // BLOCK), -(-K // BLOCK))
    around = jax.random.uniform(of_scale, blocks, jnp.float32, 0.9, 1.1)
    return _in_parts(draw, of_values, shape), around * (std / FP8_SPREAD)


def _mxfp4(key: jax.Array, std: float, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """values uint8 [..., N, K / 2] of random codes and scale uint8 [..., N, K / 32].

    Scales are two neighbouring powers of two, mixed such that the root mean square is `std`.
    """
    if shape[-1] % GROUP:
        raise ConfigError(f"mxfp4 needs rows of a multiple of {GROUP}: {shape=}")
    wanted = std / _MXFP4_RMS
    low = math.floor(math.log2(wanted))
    share_high = ((wanted / 2.0**low) ** 2 - 1) / 3
    return _codes(key, 127 + low, share_high, shape)


@functools.partial(jax.jit, static_argnums=3)
def _codes(
    key: jax.Array, low: int, share_high: float, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    *rows, K = shape
    of_values, of_scale = jax.random.split(key)
    draw = lambda key, shape: jax.random.bits(key, shape, jnp.uint8)
    values = _in_parts(draw, of_values, (*rows, K // 2))
    high = jax.random.uniform(of_scale, (*rows, K // GROUP)) < share_high
    return values, (low + high).astype(jnp.uint8)


_QUANTISERS = {"fp8": _fp8, "mxfp4": _mxfp4}


def _offsets(draft_vocab: int, vocab: int) -> jax.Array:
    """d2t [Vd]: ascending target ids minus draft ids."""
    ids = jnp.arange(draft_vocab)
    # By quotient and remainder, because ids * vocab may exceed int32.
    step, rest = divmod(vocab, draft_vocab)
    return (ids * (step - 1) + ids * rest // draft_vocab).astype(jnp.int32)
