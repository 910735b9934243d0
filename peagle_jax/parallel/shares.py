"""How the parameters of a model are cut over N devices, as data; arrays here are numpy's or jax's.

Attention, dense MLPs and the drafter are cut by heads and by columns of the MLP, experts by whole
experts, embeddings and output projections by vocabulary rows. Everything else is whole on every
device: norms, routers, biases that are added once, and the drafter's `fc`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallas_kernels.blocks import BLOCK
from peagle_jax.config import (
    AttentionConfig,
    ConfigError,
    DrafterConfig,
    TargetConfig,
)

Path = tuple[str | int, ...]
_ROW_UNIT = 32
"""Vocabulary rows of a device are a multiple of this: kernels take no other number."""


@dataclass(frozen=True)
class Part:
    """`size` consecutive entries of an axis in `pieces` that stay whole: heads, experts, blocks.

    With fewer pieces than devices, neighbouring devices hold the same piece.
    """

    size: int
    pieces: int

    def range(self, device: int, num_devices: int) -> tuple[int, int]:
        """First entry of a device's share, and the entry after its last."""
        width = self.size // self.pieces
        if self.pieces >= num_devices:
            count = self.pieces // num_devices
            return device * count * width, (device + 1) * count * width
        piece = device * self.pieces // num_devices
        return piece * width, (piece + 1) * width


@dataclass(frozen=True)
class Cut:
    """How one array is shared: along `axis`, each of its `parts` by itself.

    Args:
      padded: entries of each share, with zeros behind the last of the array; None: no padding.
    """

    axis: int
    parts: tuple[Part, ...]
    padded: int | None = None

    def ranges(self, device: int, num_devices: int) -> list[tuple[int, int]]:
        """The entries of the axis that a device holds, in the order in which it holds them."""
        if self.padded is not None:
            (part,) = self.parts
            edges = (device * self.padded, (device + 1) * self.padded)
            return [tuple(min(edge, part.size) for edge in edges)]
        spans, start = [], 0
        for part in self.parts:
            first, last = part.range(device, num_devices)
            spans.append((start + first, start + last))
            start += part.size
        return spans

    def width(self, num_devices: int) -> int:
        """Entries of a share, the same for every device."""
        return self.padded or sum(last - first for first, last in self.ranges(0, num_devices))


def share_of(array, cut: Cut, rank: int, count: int):
    """One device's share of a numpy or jax array in one piece, with zeros up to its width."""
    index = [slice(None)] * cut.axis
    ranges = cut.ranges(rank, count)
    pieces = [array[(*index, slice(*each))] for each in ranges]
    xp = pieces[0].__array_namespace__()
    share = pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=cut.axis)
    missing = cut.width(count) - share.shape[cut.axis]
    if not missing:
        return share
    shape = (*share.shape[: cut.axis], missing, *share.shape[cut.axis + 1 :])
    return xp.concat([share, xp.zeros(shape, dtype=share.dtype)], axis=cut.axis)


def vocabulary_rows(vocab_size: int, num_devices: int) -> int:
    """Rows of an embedding or output projection on each device; the last may have padding."""
    if num_devices == 1:
        return vocab_size
    rows = -(-vocab_size // num_devices)
    return rows if rows <= _ROW_UNIT else -(-rows // _ROW_UNIT) * _ROW_UNIT


def local_attention(config: AttentionConfig, num_devices: int) -> AttentionConfig:
    """The attention of one device: its query heads, and the key and value heads that these read."""
    return replace(
        config,
        num_heads=config.num_heads // num_devices,
        num_kv_heads=max(1, config.num_kv_heads // num_devices),
    )


def stored_attention(config: AttentionConfig, num_devices: int) -> AttentionConfig:
    """The attention whose K and V all devices store: more heads, if some are stored twice."""
    return replace(config, num_kv_heads=max(config.num_kv_heads, num_devices))


def check_shares(config: TargetConfig | DrafterConfig, num_devices: int) -> None:
    """Refuses models whose heads, experts or MLP widths do not divide by the number of devices.

    Raises:
      ConfigError: with the number that does not divide, `field` is "tensor_parallel".
    """
    is_target = isinstance(config, TargetConfig)
    name = "the model" if is_target else "the draft head"
    for layer in range(config.num_layers):
        _check_heads(name, config.attention(layer), num_devices)
        if is_target and config.is_sparse(layer):
            count, what = config.experts.num_experts, "experts"
        else:
            count = config.mlp_size(layer) if is_target else config.intermediate_size
            what = "columns in its MLP"
        if count % num_devices:
            raise _refusal(f"{name} has {count} {what}, {_uneven(num_devices)}")


def _check_heads(name: str, config: AttentionConfig, num_devices: int) -> None:
    N, K = config.num_heads, config.num_kv_heads
    if N % num_devices:
        raise _refusal(f"{name} has {N} query heads, {_uneven(num_devices)}")
    if K % num_devices and num_devices % K:
        raise _refusal(f"{name} has {K} key and value heads, {_uneven(num_devices)}")


def _uneven(num_devices: int) -> str:
    return f"which {num_devices} devices cannot share evenly"


def _refusal(rule: str) -> ConfigError:
    return ConfigError.of("tensor_parallel", rule)


def cut_of(
    config: TargetConfig | DrafterConfig,
    path: Path,
    shape: Sequence[int],
    weight_shape: Sequence[int],
    num_devices: int,
) -> Cut | None:
    """How the parameter at a module path is cut; None: every device holds all of it.

    Args:
      config: the model, which `check_shares` accepts.
      path: as ("layers", 3, "attention", "qkv", "weight").
      shape: of the array as stored, before it is cut.
      weight_shape: of the weight that a scale belongs to; not read for other parameters.

    Raises:
      ConfigError: a share would begin or end within a block of 128 rows or columns.
    """
    module, leaf = (path[-2] if len(path) > 1 else ""), path[-1]
    if leaf != "scale":
        weight_shape = shape  # a bias has one axis less than its weight
    if path[0] == "selector":
        return None
    if module in ("embed", "lm_head", "markov_before", "markov_after"):
        return Cut(0, (Part(shape[0], 1),), vocabulary_rows(shape[0], num_devices))
    if leaf == "sinks":
        return Cut(0, (Part(shape[0], shape[0]),))
    if module in ("gate_up", "down") and len(weight_shape) > 2 - (leaf == "bias"):
        return Cut(0, (Part(shape[0], shape[0]),))  # whole experts
    if module in ("qkv", "gate_up"):
        parts = _rows(config, path, weight_shape)
        axis = 0
    elif module in ("out", "down") and leaf != "bias":
        parts = _columns(config, path, weight_shape)
        axis = 1
    else:
        return None
    if leaf != "scale":
        return Cut(axis, parts)
    if shape[axis] == 1 and weight_shape[axis] > 1 and axis == 1:
        return None  # one scale for all columns of a row
    if shape[axis] == weight_shape[axis]:
        return Cut(axis, parts)
    return Cut(axis, tuple(_in_blocks(part, path, num_devices) for part in parts))


def _in_blocks(part: Part, path: Path, num_devices: int) -> Part:
    """The part of a scale for the part of its weight."""
    width = part.size // part.pieces
    edges = {edge for device in range(num_devices) for edge in part.range(device, num_devices)}
    if any(edge % BLOCK for edge in edges):
        name = ".".join(map(str, path[:-1]))
        blocks = f"blocks of {BLOCK} rows or columns that have one FP8 scale"
        raise _refusal(f"{name} has {blocks}, {_uneven(num_devices)}")
    if width % BLOCK:  # several pieces a block; shares hold whole blocks
        return Part(part.size // BLOCK, part.size // BLOCK)
    return Part(part.size // BLOCK, part.pieces)


def attention_at(config: TargetConfig | DrafterConfig, path: Path) -> AttentionConfig:
    """The attention of the layer that holds the module at `path`, with the heads of all devices."""
    if path[0] == "first":
        return config.attention(0)
    has_first = isinstance(config, DrafterConfig) and config.block is None
    return config.attention(path[1] + has_first)


def _rows(config, path: Path, weight_shape: Sequence[int]) -> tuple[Part, ...]:
    if path[-2] == "gate_up":
        inner = weight_shape[0] // 2
        return (Part(inner, inner), Part(inner, inner))
    attention = attention_at(config, path)
    N, K, H = attention.num_heads, attention.num_kv_heads, attention.head_dim
    others = 1 if attention.shared_kv else 2
    return (Part(N * H, N), *[Part(K * H, K)] * others)


def _columns(config, path: Path, weight_shape: Sequence[int]) -> tuple[Part, ...]:
    if path[-2] == "down":
        return (Part(weight_shape[1], weight_shape[1]),)
    attention = attention_at(config, path)
    return (Part(attention.num_heads * attention.head_dim, attention.num_heads),)
