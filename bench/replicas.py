"""Milliseconds of a round by layout of the GPUs: one engine over n of them, or replicas of smaller ones.

c sequences at once have the rate c / t of rounds in every layout, so layouts compare by t. R replicas have
c / R sequences each. A time is:

- measured: a row has it. Replicas that ran at the same time have rows of their own (`decode-step --replicas`).
- computed: between the measured loads of the same number of GPUs n, from t(c) = a + b E(c) + d c, fitted to
  the rows of n and moved to pass through them. E(c) is the expected number of different experts that the
  rows of c sequences choose.
- projected: for more GPUs than were measured. Launches do not divide, the rest of the work does, and
  experts as evenly as routing allows. What the largest measured n takes beyond that is kept, and a message
  takes longer by the bytes of the further devices, which each GPU stores directly. The host, which launches for
  all devices, is not projected, so a projected time is a lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from bench.labels import SETTING, label, markdown, title
from bench.presets import preset
from bench.roofline import experts_read
from peagle_jax.config import ConfigError, TargetConfig

KINDS = ("decode-step", "parallel-step")
_GROUP = (
    *SETTING,
    "method",
    "num_speculative_tokens",
    "max_tokens",
    "layers",
    "synthetic_acceptance_length",
)
_KEPT = (None, "peers")
"""Programs of the engine, by the field `variant` of a row: with collectives of the library, and those of today."""
_VARIED = ("adaptive", "presence_penalty", "top_k", "top_p")
KEY = (*_GROUP, *_VARIED, "variant", "tensor_parallel", "replicas", "concurrency")
"""Fields that identify a row of several GPUs."""
LAUNCH_MS = 2.6e-3
"""Least time of a kernel that waits for the one before."""
BYTES_PER_MS = 330e6
"""Bytes that a device receives from the others over NVLink of an H200."""
GPUS = (1, 2, 4, 8)
_ACTIVATION_BYTES = 2
_DRAWS = 100

NOTE = """\
Sequences are those of all GPUs together. computed: between measured loads of as many GPUs. projected: by
formulas, for more GPUs than were measured, without the host's time for further devices; a lower bound."""

Source = Literal["measured", "computed", "projected"]


@dataclass(frozen=True)
class Time:
    """Milliseconds of a round, and where they are from."""

    ms: float
    source: Source

    def __str__(self) -> str:
        text = f"{self.ms:.2f}"
        return text if self.source == "measured" else f"{text} ({self.source})"


@dataclass(frozen=True)
class Rounds:
    """Rounds of one model, method and K.

    Attributes:
      rows: measured, of one engine over one GPU and over several; each number of GPUs and sequences once.
      together: measured, of several engines at the same time.
      target: the model.
      head_layers: layers of its head.
    """

    rows: Sequence[dict]
    target: TargetConfig
    head_layers: int = 0
    together: Sequence[dict] = ()

    @cached_property
    def measured(self) -> dict[tuple[int, int], float]:
        """(GPUs, sequences) -> milliseconds."""
        return {(gpus_of(row), row["concurrency"]): row["ms_per_round"] for row in self.rows}

    def layout(self, replicas: int, gpus: int, sequences: int) -> Time:
        """A round of `sequences` sequences on engines over `gpus` GPUs each; raises as `time` does."""
        for row in self.together:
            if (row["replicas"], gpus_of(row), row["concurrency"]) == (replicas, gpus, sequences):
                return Time(row["ms_per_round"], "measured")
        return self.time(gpus, -(-sequences // replicas))

    @property
    def loads(self) -> list[int]:
        """Numbers of sequences that were measured on all measured numbers of GPUs."""
        counts = {n for n, _ in self.measured}
        return sorted({c for _, c in self.measured if all((n, c) in self.measured for n in counts)})

    def time(self, gpus: int, sequences: int) -> Time:
        """A round of `sequences` sequences on an engine over `gpus` GPUs.

        Raises:
          ConfigError: the rows do not suffice.
        """
        if (gpus, sequences) in self.measured:
            return Time(self.measured[gpus, sequences], "measured")
        if loads := list(self._cells(gpus)):
            if not min(loads) <= sequences <= max(loads):
                raise ConfigError(
                    f"{sequences} sequences on {gpus} GPUs are outside of the measured loads, "
                    f"{min(loads)} to {max(loads)}"
                )
            return Time(self._fitted(gpus, sequences), "computed")
        return Time(self._projected(gpus, sequences), "projected")

    def _rows_of(self, sequences: int) -> int:
        return sequences * (self.rows[0]["num_speculative_tokens"] + 1)

    def _experts(self, sequences: int) -> float:
        experts = self.target.experts
        if experts is None:
            return 0.0
        return experts_read(experts.num_experts, experts.top_k, self._rows_of(sequences))

    def _cells(self, gpus: int) -> dict[int, float]:
        """Measured milliseconds by sequences, ascending."""
        return dict(sorted((c, ms) for (n, c), ms in self.measured.items() if n == gpus))

    def _fit(self, gpus: int) -> np.ndarray:
        """a, b and d of the formula above by least squares, which is exact for three rows of an MoE model."""
        cells = self._cells(gpus)
        terms = np.array([self._terms(c) for c in cells])
        return np.linalg.lstsq(terms, np.array(list(cells.values())), rcond=None)[0]

    def _terms(self, sequences: int) -> list[float]:
        return [1.0, self._experts(sequences), float(sequences)]

    def _fitted(self, gpus: int, sequences: int) -> float:
        """The fitted time, plus what the fit misses at the measured loads on both sides, interpolated."""
        fit, cells = self._fit(gpus), self._cells(gpus)
        missed = [ms - fit @ self._terms(c) for c, ms in cells.items()]
        return float(fit @ self._terms(sequences) + np.interp(sequences, list(cells), missed))

    def _shared(self, gpus: int, sequences: int) -> float:
        """Launches, and the rest of one GPU's work shared by `gpus` devices."""
        whole = self.time(1, sequences).ms
        launches = LAUNCH_MS * self._kernels
        experts = self._fit(1)[1] * self._experts(sequences)
        uneven = 1.0
        if self.target.experts is not None:
            config = self.target.experts
            uneven = imbalance(config.num_experts, config.top_k, self._rows_of(sequences), gpus)
        return launches + (whole - launches - experts + experts * uneven) / gpus

    def _projected(self, gpus: int, sequences: int) -> float:
        most = max(n for n, _ in self.measured)
        if gpus not in GPUS or most not in GPUS[1:]:
            raise ConfigError(f"a projection to {gpus} GPUs needs rows of 2, 4 or 8 GPUs")
        rest = self.time(most, sequences).ms - self._shared(most, sequences)
        part = self._rows_of(sequences) * self.target.hidden_size * _ACTIVATION_BYTES
        slower = (gpus - most) * part / BYTES_PER_MS
        return self._shared(gpus, sequences) + rest + self._collectives * slower

    @property
    def _kernels(self) -> float:
        """Kernels of a round on one GPU."""
        name = "kernels_per_round"
        found = [row[name] for row in self.rows if row.get(name) and gpus_of(row) == 1]
        if not found:
            raise ConfigError("a projection needs a row of one GPU by decode-step --profile")
        return found[-1]

    @property
    def _collectives(self) -> int:
        """Collectives of a round: two a layer, token embeddings and argmax of each pass."""
        method, drafts = self.rows[0]["method"], self.rows[0]["num_speculative_tokens"]
        made = 2 * self.target.num_layers + 2
        if method == "none":
            return made
        passes = 1 if method == "peagle" else drafts
        return made + passes * (2 * self.head_layers + 2)


@cache
def imbalance(num_experts: int, top_k: int, rows: int, gpus: int) -> float:
    """Experts that the fullest of `gpus` devices reads, over the mean, if rows choose uniformly."""
    rng = np.random.default_rng(0)
    total = fullest = 0.0
    for _ in range(_DRAWS):
        chosen = rng.random((rows, num_experts)).argpartition(top_k, axis=1)[:, :top_k]
        read = np.bincount(np.unique(chosen) * gpus // num_experts, minlength=gpus)
        total, fullest = total + read.mean(), fullest + read.max()
    return fullest / total


def groups(rows: Sequence[dict]) -> list[Rounds]:
    """The rows of each setting, method and K that were measured on one GPU and on several.

    Of equal cells the newest row counts. Rows of programs that the engine no longer has do not.

    Raises:
      ConfigError: there are none.
    """
    found: dict[tuple, dict[tuple, dict]] = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        is_plain = all(row.get(name) in (None, "off") for name in _VARIED)
        is_plain &= row.get("variant") in _KEPT
        if row.get("kind") in KINDS and is_plain:
            cells = found.setdefault(tuple(row.get(name) for name in _GROUP), {})
            cell = row.get("replicas") or 1, gpus_of(row), row["concurrency"]
            # A row without a profile keeps the number of kernels of the one before.
            profile = {"kernels_per_round": cells.get(cell, {}).get("kernels_per_round")}
            cells[cell] = profile | row
    alone = lambda cells: [size for replicas, size, _ in cells if replicas == 1]
    chosen = [
        _rounds(list(cells.values()))
        for cells in found.values()
        if len(set(alone(cells))) > 1 and alone(cells).count(1) > 2
    ]
    if not chosen:
        raise ConfigError(
            "no model has rows of three loads on one GPU and rows of several GPUs: measure them by "
            "decode-step --tensor-parallel 1 and 2"
        )
    return chosen


def _rounds(rows: list[dict]) -> Rounds:
    method, layers = rows[0]["method"], rows[0].get("layers")
    model = preset(rows[0]["model"], layers)
    layers_of_head = 0 if method == "none" else model.head(method).num_layers
    is_alone = lambda row: (row.get("replicas") or 1) == 1
    together = [row for row in rows if not is_alone(row)]
    return Rounds([row for row in rows if is_alone(row)], model.target, layers_of_head, together)


def layouts(gpus: int) -> list[tuple[int, int]]:
    """(replicas, GPUs of each): from as many replicas as GPUs to one engine over all."""
    sizes = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    return [(gpus // size, size) for size in sizes]


class Table(NamedTuple):
    """Layouts down, loads across. `left_out` has the layouts for which the rows do not suffice, each with the reason."""

    header: list[str]
    lines: list[list[str]]
    left_out: dict[str, str]


def table(rounds: Rounds, gpus: Sequence[int]) -> Table:
    """The layouts of each number of GPUs; those of more GPUs than were measured need `--profile` on one."""
    header = ["GPUs", "layout", *(f"{c} sequence{'s' if c > 1 else ''}" for c in rounds.loads)]
    made, left_out = [], {}
    for count in gpus:
        for replicas, size in layouts(count):
            try:
                times = [rounds.layout(replicas, size, c) for c in rounds.loads]
            except ConfigError as error:
                left_out[_name(replicas, size)] = str(error)
                continue
            made.append([str(count), _name(replicas, size), *map(str, times)])
    return Table(header, made, left_out)


def drawn(measured: Sequence[dict], gpus: Sequence[int] = GPUS) -> str:
    """The tables of all groups of rows as Markdown.

    Raises:
      ConfigError: see `groups`.
    """
    parts = []
    for one in groups(measured):
        made = table(one, gpus)
        parts.append(f"{heading(one)}\n\n{markdown(made.header, made.lines)}\n")
    return "\n".join(parts)


def heading(rounds: Rounds) -> str:
    """Model, formats, versions and method of a table."""
    first = rounds.rows[0]
    setting = tuple(first[name] for name in SETTING)
    return f"{title(setting, list(rounds.rows))}; {label(first)}, ms a round"


def _name(replicas: int, size: int) -> str:
    if replicas == 1:
        return f"one engine over {size}" if size > 1 else "one engine"
    return f"{replicas} replicas" + (f" of {size} GPUs" if size > 1 else "")


def gpus_of(row: dict) -> int:
    """GPUs of the engine of a row."""
    return row.get("tensor_parallel") or 1
