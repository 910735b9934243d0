"""Support by platform and how it was checked: the tables that `python -m lab matrix` draws.

lab/data/portability.toml holds a word for each platform and part, and the test that shows it. Tests
compare the rest with what `pallas_kernels.dispatch` selects, with the rows in bench/results and
with the chips that the deviceless commands compile for.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pallas_kernels.device import B200, CPU, H200, L4, TPU7X, V5E, V6E, Device
from peagle_jax.config import ConfigError

Check = Literal["measured", "compiled", "interpreted", "reference", "refused"]

WORDS: dict[Check, str] = {
    "measured": "it runs there, and bench/results has times",
    "compiled": "its kernel, or a whole round, is compiled on a machine without the chip; "
    "never run there",
    "interpreted": "an interpreter runs the kernel in tests",
    "reference": "it has no kernel: XLA compiles the jnp reference",
    "refused": "it is an error that names the device and the reason",
}
ON_REQUEST = "GPU kernel on request"
PARTS = (
    "products",
    "experts",
    "attention",
    "norms, cache writes",
    "whole round",
    ON_REQUEST,
)
ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "lab" / "data" / "portability.toml"
PAGES = (ROOT / "README.md", ROOT / "docs" / "portability.md")


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
    "Hopper (H200)": Platform(H200, "h200", ("NVIDIA H200",)),
    "Blackwell (B200)": Platform(B200, "b200"),
    "Ada (L4)": Platform(L4, "l4"),
    "TPU v5e": Platform(V5E, "v5e"),
    "TPU v6e": Platform(V6E, "v6e"),
    "TPU 7x": Platform(TPU7X, "7x"),
    "Blackwell (RTX 5090)": Platform(Device("NVIDIA GeForce RTX 5090", 120, 170)),
    "AMD": Platform(Device("AMD Instinct MI300X", platform="rocm")),
    "Intel": Platform(Device("Intel(R) Data Center GPU Max 1550", platform="oneapi")),
}

KERNELS: dict[str, dict[str, str]] = {
    "products": {"cuda": "sm_90, sm_100"},
    "experts": {"cuda": "sm_90, sm_100", "tpu": "mosaic_tpu"},
    "attention": {"cuda": "sm_90, sm_100"},
    "norms, cache writes": {"cuda": "sm_90, sm_100"},
}
"""Part -> platform -> its kernels; references everywhere else."""


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


TABLES: dict[str, Callable[[], str]] = {
    "checked": checked,
    "selected": selected,
    "words": words,
}


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def update(page: str) -> str:
    """The page with the tables between its markers made anew."""
    marked = re.compile(r"(<!-- portability:(\w+) -->\n).*?(<!-- /portability:\2 -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)
