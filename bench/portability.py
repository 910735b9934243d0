"""What runs where and how it was checked: `python -m bench.portability docs/portability.md`.

The tables of docs/portability.md are made here; tests compare them with what `pallas_kernels.dispatch`
selects, with the results in bench/results and with the chips that the deviceless commands compile for.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from bench.presets import preset
from bench.random_weights import random_head
from bench.roofline import Chip, Load, round_seconds
from bench.sizes import USABLE, count
from pallas_kernels.device import B200, CPU, H200, L4, RTX5090, TPU7X, V5E, V6E, Device
from peagle_jax.cache import init_cache
from peagle_jax.config import EngineConfig

Check = Literal["measured", "compiled", "interpreted", "reference", "refused"]

WORDS: dict[Check, str] = {
    "measured": "it runs there, and bench/results has times",
    "compiled": "it is compiled for the chip, on a machine without one; it has never run there",
    "interpreted": "an interpreter runs the kernel in tests",
    "reference": "the jnp reference answers; it has been neither compiled nor timed for the chip",
    "refused": "it is an error that names the device and the reason",
}
PARTS = ("products", "experts", "attention", "norms and cache writes", "whole round")


@dataclass(frozen=True)
class Platform:
    """A kind of device and how each of `PARTS`, then a GPU kernel that is asked for, was checked.

    Attributes:
      device: a chip of it, as `dispatch` knows it.
      compiled_as: the chip's name in `bench.deviceless` or `bench.deviceless_tpu`; "" if in neither.
      measured_as: the device's name in the rows of bench/results; "" if in none.
    """

    device: Device
    checks: tuple[Check, ...]
    on_request: Check
    compiled_as: str = ""
    measured_as: str = ""


_COMPILED: tuple[Check, ...] = ("compiled",) * 5
_NOT_EXPERTS: tuple[Check, ...] = ("compiled", "reference", "compiled", "compiled", "compiled")
_REFERENCE: tuple[Check, ...] = ("reference",) * 5
_CPU: tuple[Check, ...] = ("measured", "reference", "measured", "measured", "measured")
_AMD = Device("AMD Instinct MI300X", platform="rocm")
_INTEL = Device("Intel(R) Data Center GPU Max 1550", platform="oneapi")

PLATFORMS = {
    "CPU": Platform(CPU, _CPU, "interpreted", measured_as="cpu"),
    "Hopper (H200)": Platform(H200, ("measured",) * 5, "measured", "h200", "NVIDIA H200"),
    "Blackwell, data centre (B200, B300)": Platform(B200, _COMPILED, "compiled", "b200"),
    "Blackwell, RTX (RTX 5090)": Platform(RTX5090, _NOT_EXPERTS, "compiled", "rtx5090"),
    "Ada (L4)": Platform(L4, _NOT_EXPERTS, "refused", "l4"),
    "TPU v5e": Platform(V5E, _COMPILED, "refused", "v5e"),
    "TPU v6e": Platform(V6E, _COMPILED, "refused", "v6e"),
    "TPU 7x": Platform(TPU7X, _COMPILED, "refused", "7x"),
    "AMD": Platform(_AMD, _REFERENCE, "refused"),
    "Intel": Platform(_INTEL, _REFERENCE, "refused"),
}

KERNELS: dict[str, dict[str, str]] = {
    "products": {"cuda": "sm_90, sm_100"},
    "experts": {"cuda": "sm_90, sm_100", "tpu": "mosaic_tpu"},
    "attention": {"cuda": "sm_90, sm_100"},
    "norms and cache writes": {"cuda": "sm_90, sm_100, sm_120"},
}
"""Part -> platform -> its kernels; references everywhere else."""


@dataclass(frozen=True)
class Memory:
    """A device by its data sheet: bytes of memory, and `roofline.Chip`."""

    num_bytes: float
    chip: Chip


TPUS = {
    "v5e": Memory(16 * 2**30, Chip(819e9, {"bfloat16": 197e12})),
    "v6e": Memory(32 * 2**30, Chip(1640e9, {"bfloat16": 918e12})),
    "7x, one of two devices": Memory(96 * 2**30, Chip(3690e9, {"bfloat16": 1153e12})),
}
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-coder-30b-a3b-fp8", "gpt-oss-20b")
SEQUENCES, TOKENS, DRAFTS = 8, 2048, 7


def checked() -> str:
    """Markdown: how each part was checked on each platform."""
    header = ["", *PARTS, "a GPU kernel on request"]
    lines = [[name, *one.checks, one.on_request] for name, one in PLATFORMS.items()]
    return _markdown(header, lines)


def selected() -> str:
    """Markdown: kernel or reference, by part and platform."""
    names = {"cpu": "CPU", "cuda": "NVIDIA", "tpu": "TPU", "rocm": "AMD", "oneapi": "Intel"}
    lines = [
        [
            part,
            *(f"kernel: {on[platform]}" if platform in on else "reference" for platform in names),
        ]
        for part, on in KERNELS.items()
    ]
    return _markdown(["", *names.values()], lines)


def words() -> str:
    """Markdown: what the words mean."""
    return _markdown(["word", "meaning"], [[word, meaning] for word, meaning in WORDS.items()])


def needs(name: str) -> float:
    """Bytes of a preset with its P-EAGLE head, and of the caches of all sequences."""
    chosen = preset(name)
    head = chosen.head("peagle")
    config = EngineConfig(
        num_draft=DRAFTS, max_num_seqs=SEQUENCES, max_model_len=TOKENS, dtype="bfloat16"
    )
    layers = [
        model.attention(i) for model in (chosen.target, head) for i in range(model.num_layers)
    ]
    shapes = jax.eval_shape(
        lambda: (random_head(head, dtype="bfloat16"), init_cache(layers, config))
    )
    others = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return count(chosen.target).num_bytes(chosen.format) + others


def held() -> str:
    """Markdown: what fits into a TPU, and the projected floor of a round where it does."""
    lines = []
    for name in MODELS:
        chosen, size = preset(name), needs(name)
        load = Load(
            batch=SEQUENCES, context=TOKENS / 2, num_draft=DRAFTS, accepted=2.0,
            dtype="bfloat16", weights=chosen.weights,
        )  # fmt: skip
        cells = [name, f"{size / 1e9:.1f}"]
        for one in TPUS.values():
            fits = size <= USABLE * one.num_bytes
            floor = round_seconds(chosen.target, chosen.head("peagle"), load, one.chip)
            cells.append(f"{1000 * floor:.1f}" if fits else "does not fit")
        lines.append(cells)
    return _markdown(["model", "GB", *(f"{name}, ms" for name in TPUS)], lines)


TABLES: dict[str, Callable[[], str]] = {
    "checked": checked,
    "selected": selected,
    "words": words,
    "held": held,
}


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def update(page: str) -> str:
    """The page with the tables between its markers made anew."""
    marked = re.compile(r"(<!-- portability:(\w+) -->\n).*?(<!-- /portability:\2 -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
