"""Support by platform and how it was checked: the tables that `python -m lab matrix` draws.

lab/data/portability.toml holds a word for each platform and part, and the test that shows it. Tests
compare the rest with what `pallas_kernels.dispatch` selects, with the rows in bench/results and
with the chips that the deviceless commands compile for.
"""

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
from flax import nnx

from bench.presets import Format, preset
from bench.random_weights import QUANTISED, random_head
from bench.roofline import Chip, Load, round_seconds
from pallas_kernels.device import B200, CPU, H200, L4, RTX5090, TPU7X, V5E, V6E, Device
from peagle_jax.config import ConfigError, EngineConfig, TargetConfig
from peagle_jax.models import build
from peagle_jax.models.cache import init_cache

Check = Literal["measured", "compiled", "interpreted", "reference", "refused"]

WORDS: dict[Check, str] = {
    "measured": "it runs there, and bench/results has times",
    "compiled": "its kernel, or the program of a whole round, is compiled for the chip on a "
    "machine without one; it has never run there",
    "interpreted": "an interpreter runs the kernel in tests",
    "reference": "it has no kernel: XLA compiles the jnp reference",
    "refused": "it is an error that names the device and the reason",
}
ON_REQUEST = "GPU kernel on request"
PARTS = (
    "products",
    "experts",
    "attention",
    "norms, routing, cache writes",
    "whole round",
    ON_REQUEST,
)
ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "lab" / "data" / "portability.toml"
PAGES = (ROOT / "README.md", ROOT / "docs" / "portability.md")


USABLE = 0.92
"""Share of a device's memory for weights and caches; the rest is for driver, programs and
activations."""
_BITS = {"bf16": 16, "fp8": 8 + 32 / 128**2, "mxfp4": 4 + 8 / 32}


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters: experts, other matrices of the layers, everything else."""

    experts: int
    matrices: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.matrices + self.rest

    def num_bytes(self, form: Format) -> int:
        """Bytes in memory. mxfp4 is GPT-OSS's: only experts are quantised."""
        experts = self.experts * _BITS[form]
        matrices = self.matrices * _BITS["bf16" if form == "mxfp4" else form]
        return int(experts + matrices + self.rest * _BITS["bf16"]) // 8


@functools.cache
def count(config: TargetConfig) -> Weights:
    """Numbers of parameters of a target, from shapes alone."""
    model = nnx.eval_shape(lambda: build(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    sizes = {"experts": 0, "matrices": 0, "rest": 0}
    for path, leaf in dict(nnx.to_flat_state(nnx.state(model))).items():
        quantised = path[-1] == "weight" and path[-2] in QUANTISED
        kind = "experts" if len(leaf.shape) > 2 else "matrices"
        sizes[kind if quantised else "rest"] += leaf.size
    return Weights(**sizes)


class Shown(NamedTuple):
    """How one part was checked on one platform, and the pytest id of the test that shows it."""

    word: Check
    test: str


@functools.cache
def evidence() -> dict[str, dict[str, Shown]]:
    """Platform -> part of `PARTS` -> how it was checked.

    Raises:
      ConfigError: the tests are not installed beside this package.
    """
    if not EVIDENCE.is_file():
        raise ConfigError(
            f"{EVIDENCE} does not exist; run this command in a clone of the repository"
        )
    table = tomllib.loads(EVIDENCE.read_text(encoding="utf-8"))
    return {name: {part: Shown(*one[part]) for part in PARTS} for name, one in table.items()}


@dataclass(frozen=True)
class Platform:
    """A kind of device.

    Attributes:
      device: a chip of it, as `dispatch` takes it.
      compiled_as: the chip's name in `lab.deviceless` or `lab.deviceless_tpu`; "" if in neither.
      measured_as: the devices' names in the rows of bench/results.
    """

    device: Device
    compiled_as: str = ""
    measured_as: tuple[str, ...] = ()


PLATFORMS = {
    "CPU": Platform(CPU, measured_as=("cpu",)),
    "Hopper (H200)": Platform(H200, "h200", ("NVIDIA H200", "NVIDIA H100 80GB HBM3")),
    "Blackwell, data centre (B200)": Platform(B200, "b200"),
    "Blackwell, RTX (RTX 5090)": Platform(RTX5090, "rtx5090"),
    "Ada (L4)": Platform(L4, "l4"),
    "TPU v5e": Platform(V5E, "v5e"),
    "TPU v6e": Platform(V6E, "v6e"),
    "TPU 7x": Platform(TPU7X, "7x"),
    "AMD": Platform(Device("AMD Instinct MI300X", platform="rocm")),
    "Intel": Platform(Device("Intel(R) Data Center GPU Max 1550", platform="oneapi")),
}

KERNELS: dict[str, dict[str, str]] = {
    "products": {"cuda": "sm_90, sm_100, sm_120"},
    "experts": {"cuda": "sm_90, sm_100, sm_120", "tpu": "mosaic_tpu"},
    "attention": {"cuda": "sm_90, sm_100, sm_120"},
    "norms, routing, cache writes": {"cuda": "sm_90, sm_100, sm_120"},
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
BLACKWELL = Chip(8e12, {"bfloat16": 2.25e15})
"""A B200 by its data sheet: 8 TB/s, dense bfloat16."""
LARGE_MODELS = (
    "qwen3-coder-30b-a3b-fp8",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-4-31b-fp8",
    "llama-3.1-8b-fp8",
    "llama-3.1-8b",
)
CONCURRENCY = (1, 8, 32, 128)
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-coder-30b-a3b-fp8", "gpt-oss-20b")
SEQUENCES, TOKENS, DRAFTS = 8, 2048, 7


def checked() -> str:
    """Markdown: how each part was checked; neighbours with the same words share a line."""
    words = lambda item: [shown.word for shown in item[1].values()]
    groups = [(list(same), line) for line, same in itertools.groupby(evidence().items(), words)]
    lines = [[", ".join(name for name, _ in same), *line] for same, line in groups]
    return _markdown(["", *PARTS], lines)


def listed() -> str:
    """A line for each platform and part: the word and the test that shows it."""
    return "\n".join(
        f"{name}, {part}: {shown.word}, {shown.test}"
        for name, one in evidence().items()
        for part, shown in one.items()
    )


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
            batch=SEQUENCES,
            context=TOKENS / 2,
            num_draft=DRAFTS,
            accepted=2.0,
            dtype="bfloat16",
            weights=chosen.weights,
        )
        cells = [name, f"{size / 1e9:.1f}"]
        for one in TPUS.values():
            fits = size <= USABLE * one.num_bytes
            floor = round_seconds(chosen.target, chosen.head("peagle"), load, one.chip)
            cells.append(f"{1000 * floor:.1f}" if fits else "does not fit")
        lines.append(cells)
    return _markdown(["model", "GB", *(f"{name}, ms" for name in TPUS)], lines)


def floors() -> str:
    """Markdown: projected floors on a B200 of plain decoding and P-EAGLE, by model and
    concurrency."""
    lines = []
    for name, drafts in itertools.product(LARGE_MODELS, (0, DRAFTS)):
        chosen = preset(name)
        head = chosen.head("peagle") if drafts else None
        cells = [name, f"P-EAGLE K={drafts}" if drafts else "plain"]
        for batch in CONCURRENCY:
            load = Load(
                batch=batch,
                context=768,
                num_draft=drafts,
                accepted=2.1 if drafts else 0.0,
                dtype="bfloat16",
                weights=chosen.weights,
            )
            cells.append(f"{1000 * round_seconds(chosen.target, head, load, BLACKWELL):.2f}")
            lines.append(cells)
    return _markdown(["model", "method", *map(str, CONCURRENCY)], lines)


TABLES: dict[str, Callable[[], str]] = {
    "checked": checked,
    "selected": selected,
    "words": words,
    "held": held,
    "floors": floors,
}


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def update(page: str) -> str:
    """The page with the tables between its markers made anew."""
    marked = re.compile(r"(<!-- portability:(\w+) -->\n).*?(<!-- /portability:\2 -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)
