"""The expected contents of each parameter of a converted folder, from names and shapes of the source.

An independent specification for `verify`: it shares no code with the tables, blocks and transforms of the
converter, and reads no config.json. Unknown parameters fail the verification, so a new family adds its
names here too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convert.decode import BLOCK, SourceTensors, fp8_scale_grid

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """A parameter: the bits of `rows(start, stop)` along its first axis, as unsigned integers."""

    names: tuple[str, ...]
    dtype: str
    shape: Shape
    rows: Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class ExpectedScale:
    """FP8 scales of a stack of matrices [rows, columns], each an entry of `leading`.

    `grid(i)` are bits and float32 numbers [rows, columns / 128] of matrix i of the flattened stack.
    """

    names: tuple[str, ...]
    dtype: str
    leading: Shape
    matrix: tuple[int, int]
    grid: Callable[[int], tuple[np.ndarray, np.ndarray]]


Make = Callable[[SourceTensors, tuple[str, ...]], Expected]


def _dtype(source: SourceTensors, names: Sequence[str]) -> str:
    """The tensors' common dtype; "A or B" if they differ, which matches no parameter."""
    return " or ".join(sorted({source.dtypes[name] for name in names}))


def _concatenated(source: SourceTensors, names: tuple[str, ...]) -> Expected:
    """Concatenation along axis 0."""
    heights = [source.shapes[name][0] for name in names]

    def rows(start: int, stop: int) -> np.ndarray:
        out, first = [], 0
        for name, height in zip(names, heights, strict=True):
            low, high = max(start - first, 0), min(stop - first, height)
            if low < high:
                out.append(source.rows(name, low, high))
            first += height
        return np.concatenate(out)

    shape = (sum(heights), *source.shapes[names[0]][1:])
    return Expected(names, _dtype(source, names), shape, rows)


def _reshaped(shape: Callable[[Shape], Shape]) -> Make:
    """One tensor in another shape; its first axis stays, unless it becomes a vector."""

    def make(source: SourceTensors, names: tuple[str, ...]) -> Expected:
        (name,) = names
        shaped = shape(source.shapes[name])

        def rows(start: int, stop: int) -> np.ndarray:
            if shaped[:1] != source.shapes[name][:1]:
                return source.whole(name).reshape(shaped)[start:stop]
            return source.rows(name, start, stop).reshape(stop - start, *shaped[1:])

        return Expected(names, source.dtypes[name], shaped, rows)

    return make


as_it_is = _reshaped(lambda shape: shape)
_vector = _reshaped(lambda shape: (int(np.prod(shape)),))
_groups_joined = _reshaped(lambda shape: (*shape[:-2], shape[-2] * shape[-1]))


def _experts(of: int) -> Make:
    """Entry e stacks the `of` matrices of expert e; without an axis for them if there is one."""

    def make(source: SourceTensors, names: tuple[str, ...]) -> Expected:
        inner = source.shapes[names[0]]
        stack = (len(names) // of, of) if of > 1 else (len(names),)

        def rows(start: int, stop: int) -> np.ndarray:
            matrices = [source.whole(name) for name in names[start * of : stop * of]]
            return np.stack(matrices).reshape(stop - start, *stack[1:], *inner)

        return Expected(names, _dtype(source, names), (*stack, *inner), rows)

    return make


def _deinterleaved(source: SourceTensors, names: tuple[str, ...]) -> Expected:
    """[E, 2F, ...], even rows gate and odd rows up -> [E, 2, F, the rest as one axis]."""
    (name,) = names
    E, rows_of_both, *rest = source.shapes[name]
    width = [int(np.prod(rest))] if rest else []

    def rows(start: int, stop: int) -> np.ndarray:
        x = source.rows(name, start, stop)
        halves = np.stack([x[:, 0::2], x[:, 1::2]], axis=1)
        return halves.reshape(stop - start, 2, rows_of_both // 2, *width)

    return Expected(names, source.dtypes[name], (E, 2, rows_of_both // 2, *width), rows)


def _deinterleaved_columns(source: SourceTensors, names: tuple[str, ...]) -> Expected:
    """[E, D, 2F], even columns gate and odd columns up -> [E, 2, F, D]."""
    (name,) = names
    E, D, both = source.shapes[name]

    def rows(start: int, stop: int) -> np.ndarray:
        x = np.moveaxis(source.rows(name, start, stop), 2, 1)
        return np.stack([x[:, 0::2], x[:, 1::2]], axis=1)

    return Expected(names, source.dtypes[name], (E, 2, both // 2, D), rows)


def _transposed(source: SourceTensors, names: tuple[str, ...]) -> Expected:
    """[E, F, D] -> [E, D, F]."""
    (name,) = names
    E, F, D = source.shapes[name]
    rows = lambda start, stop: np.moveaxis(source.rows(name, start, stop), 2, 1)
    return Expected(names, source.dtypes[name], (E, D, F), rows)


_B = r"(?P<block>first|layers\.\d+)\."
_MATRICES: tuple[tuple[str, str, Make], ...] = (
    (_B + r"self_attn\.(?P<part>[qkv])_proj", "{block}.attention.qkv", _concatenated),
    (_B + r"self_attn\.o_proj", "{block}.attention.out", as_it_is),
    (_B + r"mlp\.(?P<part>gate|up)_proj", "{block}.mlp.gate_up", _concatenated),
    (_B + r"mlp\.down_proj", "{block}.mlp.down", as_it_is),
    (_B + r"mlp\.experts\.(?P<expert>\d+)\.(?P<part>gate|up)_proj", "{block}.mlp.gate_up", _experts(2)),
    (_B + r"mlp\.experts\.(?P<expert>\d+)\.down_proj", "{block}.mlp.down", _experts(1)),
)  # fmt: skip
"""Matrices that may be FP8: names without their last part, the parameter, and how it is made."""
_OTHERS: tuple[tuple[str, str, Make], ...] = (
    (_B + r"self_attn\.(?P<norm>[qk]_norm)\.weight", "{block}.attention.{norm}.weight", as_it_is),
    (_B + r"self_attn\.sinks", "{block}.attention.sinks", as_it_is),
    (_B + r"mlp\.(?:gate|router)\.(?P<leaf>weight|bias)", "{block}.mlp.router.{leaf}", as_it_is),
    (_B + r"mlp\.experts\.gate_up_proj_blocks", "{block}.mlp.gate_up.weight", _deinterleaved),
    (_B + r"mlp\.experts\.gate_up_proj_scales", "{block}.mlp.gate_up.scale", _deinterleaved),
    (_B + r"mlp\.experts\.gate_up_proj_bias", "{block}.mlp.gate_up.bias", _deinterleaved),
    (_B + r"mlp\.experts\.gate_up_proj", "{block}.mlp.gate_up.weight", _deinterleaved_columns),
    (_B + r"mlp\.experts\.down_proj_blocks", "{block}.mlp.down.weight", _groups_joined),
    (_B + r"mlp\.experts\.down_proj_scales", "{block}.mlp.down.scale", as_it_is),
    (_B + r"mlp\.experts\.down_proj_bias", "{block}.mlp.down.bias", as_it_is),
    (_B + r"mlp\.experts\.down_proj", "{block}.mlp.down.weight", _transposed),
    (_B + r"layer_scalar", "{block}.layer_scalar", _vector),
    (_B + r"hidden_norm\.weight", "{block}.hidden_norm.weight", as_it_is),
    (_B + r"input_layernorm\.weight", "{block}.input_norm.weight", as_it_is),
    (r"embed_tokens\.weight", "embed.weight", as_it_is),
    (
        r"(?P<name>norm|lm_head|fc|input_norm|fc_norm\.\d+|selector\.\w+)\.weight",
        "{name}.weight",
        as_it_is,
    ),
    (r"mask_hidden", "mask_hidden", _vector),
    (r"d2t", "d2t", as_it_is),
)
_NORMS = ((_B + r"post_attention_layernorm\.weight", "{block}.post_norm.weight", as_it_is),)
_NORMS_OF_GEMMA = (
    (_B + r"post_attention_layernorm\.weight", "{block}.post_attention_norm.weight", as_it_is),
    (_B + r"pre_feedforward_layernorm\.weight", "{block}.pre_mlp_norm.weight", as_it_is),
    (_B + r"post_feedforward_layernorm\.weight", "{block}.post_mlp_norm.weight", as_it_is),
)
_WITHOUT_USE = re.compile(
    r".*\.(rotary_emb\.inv_freq|input_scale|[qkv]_scale)|t2d"
    r"|(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*"
)
_ORDER = {part: i for i, part in enumerate(("q", "k", "v", "gate", "up"))}


def expected_parameters(source: SourceTensors) -> dict[str, Expected | ExpectedScale]:
    """By key ("layers.0.attention.qkv.weight"), all parameters that the source's tensors make."""
    gemma = any(name.endswith("pre_feedforward_layernorm.weight") for name in source.dtypes)
    rules = (*_OTHERS, *(_NORMS_OF_GEMMA if gemma else _NORMS))
    parameters: dict[str, list[tuple[tuple, str, Make | None]]] = {}
    for name in source.dtypes:
        plain = _plain_name(name, source)
        for pattern, key, make in _MATRICES:
            match = re.fullmatch(pattern + r"\.(weight|bias|weight_scale(?:_inv)?)", plain)
            if match:
                leaf = match[match.re.groups]
                is_scale = leaf.startswith("weight_scale")
                path = f"{key.format(**match.groupdict())}.{'scale' if is_scale else leaf}"
                entry = (_place(match.groupdict()), name, None if is_scale else make)
                parameters.setdefault(path, []).append(entry)
        for pattern, key, make in rules:
            if match := re.fullmatch(pattern, plain):
                entry = (_place(match.groupdict()), name, make)
                parameters.setdefault(key.format(**match.groupdict()), []).append(entry)
    out = {}
    for key, entries in parameters.items():
        names = tuple(name for _, name, _ in sorted(entries, key=lambda entry: entry[0]))
        make = entries[0][2]
        out[key] = _scale(source, names) if make is None else make(source, names)
    return out


def may_be_unused(source: SourceTensors, name: str) -> bool:
    """Whether a tensor may be unused: it is not part of the model, or it duplicates another tensor."""
    plain = _plain_name(name, source)
    if plain == "lm_head.weight":
        return any(
            source.dtypes[other] == source.dtypes[name]
            and source.shapes[other] == source.shapes[name]
            and _same(source, name, other)
            for other in source.dtypes
            if other.endswith("embed_tokens.weight")
        )
    if plain == "d2t":  # offsets, or ids, of a whole vocabulary
        ids = source.whole(name).reshape(-1).view(np.int64)
        return not ids.any() or np.array_equal(ids, np.arange(len(ids)))
    return re.fullmatch(_WITHOUT_USE, plain) is not None


def _same(source: SourceTensors, name: str, other: str, step: int = 1024) -> bool:
    height = source.shapes[name][0]
    cuts = [(start, min(start + step, height)) for start in range(0, height, step)]
    return all(np.array_equal(source.rows(name, *cut), source.rows(other, *cut)) for cut in cuts)


def _plain_name(name: str, source: SourceTensors) -> str:
    """The name without the model's, and in a head with "first" for its first layer, "layers.0" for the next."""
    plain = name.removeprefix("model.").removeprefix("language_model.")
    if "fc.weight" not in source and "model.fc.weight" not in source:
        return plain
    plain = re.sub(r"^(midlayer|layers\.0)\.", "first.", plain)
    return re.sub(r"^layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) - 1}.", plain)


def _place(groups: dict[str, str]) -> tuple[int, int]:
    """Sort key of a tensor within its parameter: expert, then part."""
    return int(groups.get("expert") or 0), _ORDER.get(groups.get("part") or "q", 0)


def _scale(source: SourceTensors, names: tuple[str, ...]) -> ExpectedScale:
    """Scales of FP8 matrices that are concatenated along rows, or stacked as experts."""
    weights = [re.sub(r"_scale(_inv)?$", "", name) for name in names]
    shapes = [source.shapes[name] for name in weights]
    dtype = _dtype(source, names)
    if ".experts." not in names[0]:

        def grid(i: int) -> tuple[np.ndarray, np.ndarray]:
            each = [
                fp8_scale_grid(source.whole(name), source.dtypes[name], *shape)
                for name, shape in zip(names, shapes, strict=True)
            ]
            bits, numbers = zip(*each, strict=True)
            return np.concatenate(bits), np.concatenate(numbers)

        return ExpectedScale(names, dtype, (), (sum(s[0] for s in shapes), shapes[0][1]), grid)
    of = 1 if "down_proj" in names[0] else 2
    leading = (len(names),) if of == 1 else (len(names) // of, of)
    one = lambda i: fp8_scale_grid(source.whole(names[i]), source.dtypes[names[i]], *shapes[i])
    return ExpectedScale(names, dtype, leading, shapes[0], one)


def stored_grid(scales: np.ndarray, matrix: tuple[int, int]) -> np.ndarray | None:
    """Expands a stored scale [Sn, Sk] to [rows, columns / 128]; None if its shape is invalid.

    Sn is the number of rows or of blocks of 128 rows; Sk is 1 or the number of blocks of 128 columns.
    """
    rows, across = matrix[0], -(-matrix[1] // BLOCK)
    if scales.shape[0] not in (rows, -(-rows // BLOCK)) or scales.shape[1] not in (1, across):
        return None
    picked = np.arange(rows) if scales.shape[0] == rows else np.arange(rows) // BLOCK
    return np.broadcast_to(scales[picked], (rows, across))
