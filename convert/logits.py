"""End-to-end check of a conversion: our logits against those of the PyTorch model, on random tokens.

PyTorch is not a dependency. Without it, or without memory for two float32 copies of the model, the check
is skipped with a message. FP8 checkpoints are dequantised for PyTorch first, because transformers reads
some forms of scales incorrectly and others not at all.
"""

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert.numbers import BLOCK
from convert.source import Source
from peagle_jax.checkpoint import Checkpoint, load_target
from peagle_jax.checkpoint.layout import FP8
from peagle_jax.checkpoint.safetensors import write
from peagle_jax.models.layers import AttentionRows


class NotCompared(Exception):
    """transformers cannot run the model; the message has the first line of its reason."""


SEQUENCES, TOKENS = 2, 24
TOLERANCE = 1e-3
"""Tolerance relative to the largest logit: both sides compute in float32, in different order."""
_COPIES = 2.5
"""Memory needed, in float32 copies of the parameters: PyTorch's, ours, and temporaries."""


@dataclass(frozen=True)
class LogitsComparison:
    """`largest` difference relative to the largest logit; `agreement`: share of equal argmax tokens."""

    positions: int
    largest: float
    agreement: float


def why_skipped(kind: str, num_parameters: int) -> str | None:
    """Why logits cannot be compared here, or None."""
    if kind != "target":
        return "logits are compared for targets only"
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    needed, free = _COPIES * 4 * num_parameters, free_memory()
    if needed > free:
        return f"both models in float32 need {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
    return None


def free_memory() -> int:
    """Available memory in bytes: free or file cache."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def compare_logits(source: Source, model: Path, *, seed: int = 0) -> LogitsComparison:
    """Logits at every position of a few random sequences.

    Args:
      source: the checkpoint that transformers runs.
      model: the folder that we load, converted or not.
    Raises:
      NotCompared: transformers refuses the model, lacks a package for it, or fails in it.
    """
    ours = load_target(model, dtype="float32")
    size = (SEQUENCES, TOKENS)
    tokens = np.random.default_rng(seed).integers(0, ours.config.vocab_size, size)
    positions = jnp.broadcast_to(jnp.arange(TOKENS), size)
    cache = [None] * ours.config.num_layers
    last, _, _ = ours(jnp.asarray(tokens, jnp.int32), positions, cache, _attend)
    got = np.asarray(ours.unembed(last))
    with _readable(source) as folder:
        want = _torch_logits(folder, tokens)
    return LogitsComparison(
        positions=tokens.size,
        largest=float(np.abs(got - want).max() / np.abs(want).max()),
        agreement=float((got.argmax(-1) == want.argmax(-1)).mean()),
    )


def _torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model.float().eval()(torch.from_numpy(tokens)).logits.numpy()
    except Exception as error:  # of foreign code: what it cannot run says nothing of the conversion
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        raise NotCompared(lines[0]) from error


@contextmanager
def _readable(source: Source) -> Iterator[Path]:
    """The source's folder, or a temporary copy without FP8."""
    infos = source.tensors.infos
    if not any(info.dtype == FP8 for info in infos.values()):
        yield source.tensors.folder
        return
    checkpoint, plain = Checkpoint(source.tensors.folder), {}
    for rule in source.layout.rules:
        for name in rule.names if rule.path[-1] != "scale" else ():
            weight = checkpoint.read(name)
            ends = [end for end in ("_scale_inv", "_scale") if f"{name}{end}" in infos]
            if weight.dtype == FP8:
                weight = _dequantized(weight, checkpoint.read(name + ends[0]))
            plain[name] = weight
    with tempfile.TemporaryDirectory() as copy:
        raw = json.loads((source.tensors.folder / "config.json").read_text(encoding="utf-8"))
        raw.pop("quantization_config")
        (Path(copy) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        write(Path(copy) / "model.safetensors", plain)
        del plain
        yield Path(copy)


def _dequantized(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """FP8 [n, k] times a scale for the tensor, each row [n, 1] or [n], or each 128 x 128 block."""
    n, k = weight.shape
    if scale.size == 1 or scale.shape == (n, 1):
        spread = scale.reshape(-1, 1)
    elif scale.shape == (n,):
        spread = scale[:, None]
    else:
        rows = scale if scale.shape[0] == n else np.repeat(scale, BLOCK, axis=0)[:n]
        spread = np.repeat(rows, BLOCK, axis=1)[:, :k]
    return weight.astype(np.float32) * spread.astype(np.float32)


def _attend(rows: AttentionRows, cache: None, *, window: int | None, scale: float, sinks):
    """Reference `layers.Attend` over whole sequences without a cache."""
    q, k, v = rows.heads()
    T = q.shape[1]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    behind = jnp.arange(T)[:, None] - jnp.arange(T)
    visible = (behind >= 0) & (behind < (T if window is None else window))
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :T]
    return jnp.einsum("bnts,bsnh->btnh", weights, v), None
