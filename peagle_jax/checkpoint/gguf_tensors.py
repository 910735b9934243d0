"""Tensors of a GGUF file -> tensors of a Hugging Face folder: names, orders, and what is stacked or
split.

llama.cpp stores q and k of Llama in the order of interleaved rope, the experts of a layer as one
tensor, and gate and up of GPT-OSS apart. Each table has the names of its architecture's tensors
without `blk.N.`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.gguf_file import FLOATS, GgufFile, GgufTensor

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NAMES = {
    "llama": _ATTENTION | _MLP,
    "qwen2": _ATTENTION | _MLP,
    "qwen3": _ATTENTION | _MLP | _QK_NORM,
    "qwen3moe": _ATTENTION
    | _QK_NORM
    | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
    "gpt-oss": _ATTENTION
    | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "gemma4": _ATTENTION
    | _MLP
    | _QK_NORM
    | {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_WHOLE_NAMES = {
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks"},
    "gemma4": {"layer_output_scale.weight": "layer_scalar"},
}
"""Tensors whose name in a folder has no `.weight`."""
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps\.(weight|bias)")
_READ_BY_CONFIG = {"rope_freqs.weight"}


@dataclass(frozen=True)
class FolderTensor:
    """A tensor to be written; `read` returns its numbers in any float dtype, packed MXFP4 as uint8.

    `source` is the (first) tensor of the file that it is made of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: GgufTensor
    read: Callable[[], np.ndarray]


def folder_tensors(file: GgufFile, config: dict, matrices: np.dtype) -> list[FolderTensor]:
    """The tensors of a folder, in the order of their bytes in the file.

    Args:
      config: of `gguf_config.model_config`.
      matrices: dtype of matrices. Float32 vectors and routers stay float32.
    Raises:
      CheckpointError: a tensor without a place in the architecture.
    """
    architecture = file.metadata["general.architecture"]
    found = []
    for name, tensor in file.tensors.items():
        if name in _READ_BY_CONFIG:
            continue
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if block and _EXPERTS.fullmatch(block[2]) and architecture in _EXPERT_READERS:
            read = _EXPERT_READERS[architecture]
            found += read(file, tensor, f"model.layers.{block[1]}.mlp", block[2], matrices)
            continue
        place = _place(architecture, name, block)
        if place is None:
            raise file.error(
                f"tensor {name!r} ({tensor.type}) has no place in a model of architecture "
                f"{architecture}"
            )
        read = tensor.floats
        if architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
            heads = "num_attention_heads" if ".attn_q." in name else "num_key_value_heads"
            read = partial(_unpermuted, file, tensor, config.get(heads))
        kept = tensor.type == "F32" and (len(tensor.shape) < 2 or ".ffn_gate_inp." in name)
        found.append(
            FolderTensor(place, tensor.shape, DTYPES["float32"] if kept else matrices, tensor, read)
        )
    return found


def matrix_dtype(file: GgufFile) -> np.dtype:
    """The type of the file's matrices where all have one float type, else bfloat16."""
    types = {
        tensor.type
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and name.endswith(".weight") and ".ffn_gate_inp." not in name
    }
    return FLOATS[types.pop()] if len(types) == 1 and types <= FLOATS.keys() else DTYPES["bfloat16"]


def _place(architecture: str, name: str, block: re.Match | None) -> str | None:
    """The name in a folder, None without one."""
    if block is None:
        stem, _, end = name.rpartition(".")
        return f"{_OUTER[stem]}.{end}" if stem in _OUTER and end == "weight" else None
    number, inner = block[1], block[2]
    whole = _WHOLE_NAMES.get(architecture, {}).get(inner)
    stem, _, end = inner.rpartition(".")
    if whole is None and (stem not in _NAMES[architecture] or end not in ("weight", "bias")):
        return None
    return f"model.layers.{number}.{whole or f'{_NAMES[architecture][stem]}.{end}'}"


def _unpermuted(file: GgufFile, tensor: GgufTensor, heads: object) -> np.ndarray:
    """Rows of q or k in the order of halves: llama.cpp pairs neighbours, transformers a half with
    the other."""
    rows = tensor.shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise file.error(
            f"tensor {tensor.name!r} ({tensor.type}): {rows} rows are not of {heads} heads"
        )
    pairs = tensor.floats().reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _qwen3_experts(
    file: GgufFile, tensor: GgufTensor, base: str, inner: str, dtype: np.dtype
) -> Iterator[FolderTensor]:
    """One matrix for each expert."""
    part, end = _EXPERTS.fullmatch(inner).groups()
    for i in range(tensor.shape[0] if len(tensor.shape) > 1 else 0):
        name = f"{base}.experts.{i}.{part}_proj.{end}"
        yield FolderTensor(name, tensor.shape[1:], dtype, tensor, partial(tensor.floats, i))


def _gpt_oss_experts(
    file: GgufFile, tensor: GgufTensor, base: str, inner: str, dtype: np.dtype
) -> Iterator[FolderTensor]:
    """Rows of gate and up alternate; MXFP4 stays packed, other weights are in-by-out."""
    part, end = _EXPERTS.fullmatch(inner).groups()
    if part == "up":
        return  # comes with gate
    layer = tensor.name.removesuffix(inner)
    names = ["gate", "up"] if part == "gate" else ["down"]
    found = [file.tensors.get(f"{layer}ffn_{one}_exps.{end}") for one in names]
    if None in found or len({one.shape for one in found}) > 1:
        raise file.error(
            f"tensor {tensor.name!r} ({tensor.type}) has no ffn_up_exps of its shape beside it"
        )
    if len(tensor.shape) != (3 if end == "weight" else 2):
        raise file.error(f"tensor {tensor.name!r} ({tensor.type}) has shape {tensor.shape}")
    experts, rows, *columns = tensor.shape
    shape = (experts, rows * len(found), *columns)
    name = f"{base}.experts.{'gate_up' if part == 'gate' else part}_proj"
    if end == "bias":
        yield FolderTensor(
            f"{name}_bias",
            shape,
            DTYPES["float32"],
            tensor,
            lambda: _alternating([x.floats() for x in found]),
        )
    elif _is_packed(file, layer):
        groups = columns[0] // 32
        yield FolderTensor(
            f"{name}_blocks",
            (*shape[:2], groups, 16),
            np.dtype(np.uint8),
            tensor,
            lambda: _alternating([_mxfp4(x)[0] for x in found]),
        )
        yield FolderTensor(
            f"{name}_scales",
            (*shape[:2], groups),
            np.dtype(np.uint8),
            tensor,
            lambda: _alternating([_mxfp4(x)[1] for x in found]),
        )
    else:
        yield FolderTensor(
            name,
            (experts, *columns, shape[1]),
            dtype,
            tensor,
            lambda: _alternating([x.floats() for x in found]).swapaxes(1, 2),
        )


def _is_packed(file: GgufFile, layer: str) -> bool:
    """Whether all experts of a layer are MXFP4; a folder has all of them packed or none."""
    tensors = [file.tensors.get(f"{layer}ffn_{one}_exps.weight") for one in ("gate", "up", "down")]
    return all(one is not None and one.type == "MXFP4" for one in tensors)


def _alternating(parts: list[np.ndarray]) -> np.ndarray:
    """[E, F, ...] of gate and of up -> [E, 2F, ...] with gate in the even rows."""
    stacked = np.stack(parts, axis=2)
    return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])


def _mxfp4(tensor: GgufTensor) -> tuple[np.ndarray, np.ndarray]:
    """(values [E, R, C / 32, 16], scales [E, R, C / 32]), uint8.

    A byte of the file holds numbers j and j + 16 of 32, of a folder numbers 2j and 2j + 1.
    """
    experts, rows, columns = tensor.shape
    blocks = tensor.data.reshape(experts, rows, columns // 32, 17)
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    numbers = np.concatenate([low, high], axis=-1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0]


_EXPERT_READERS = {"qwen3moe": _qwen3_experts, "gpt-oss": _gpt_oss_experts}
