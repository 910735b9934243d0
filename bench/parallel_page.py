"""Tables of docs/parallel.md for models on several GPUs: times of rounds, host times, and compared texts."""

from collections.abc import Callable, Sequence

from bench import labels
from bench.replicas import KEY as STEP_KEY
from bench.replicas import gpus_of
from peagle_jax.cli.runs import METHOD_NAMES
from peagle_jax.config import ConfigError

TEXTS_KEY = (
    "device", "model", "dtype", "weights", "activations", "layers", "set", "method", "num_speculative_tokens",
    "max_tokens", "tensor_parallel", "concurrency", "reference_concurrency", "variant", "seed",
)  # fmt: skip
"""Fields that identify a row of `lossless` on several GPUs."""
_VARIANTS = {
    "peers": "",
    None: "collectives of the library",
    "captured": "collectives in the graph (not kept)",
    "peers-numbered": "a number beside each word (not kept)",
}
"""How several GPUs exchange arrays, by the field `variant` of a row; "" is the default."""

TARGETS = {
    "qwen3-coder-30b-a3b-fp8": {1: 5.0, 8: 7.4, 32: 10.0},
    "gpt-oss-120b": {1: 6.2, 8: 12.8},
    "llama-3.3-70b-fp8": {1: 15.5, 8: 16.5},
}
"""Milliseconds of a round of P-EAGLE K = 7 on two H200, by model and number of sequences."""
_TARGET = dict(
    device="NVIDIA H200", method="peagle", num_speculative_tokens=7, tensor_parallel=2, variant="peers",
    activations="bf16", temperature=0,
)  # fmt: skip

Cells = dict[int, dict]
"""Rows by number of sequences."""


def rounds_table(measured: Sequence[dict]) -> str:
    """Milliseconds of a round: models by numbers of GPUs down, sequences across."""
    across = sorted({row["concurrency"] for row in measured})
    lines = [
        [*name, *(_number(cells.get(c), "ms_per_round", ".2f") for c in across)]
        for name, cells in _by_engine(measured)
    ]
    header = ["model", "GPUs", *(f"{c} sequence{'s' if c > 1 else ''}" for c in across)]
    return _part(measured, header, lines)


def targets_table(measured: Sequence[dict]) -> str:
    """`TARGETS` beside the rounds of the engine's own programs, with activations in bfloat16."""
    measured_ms = {
        (row["model"], row["concurrency"]): row["ms_per_round"]
        for row in measured
        if _TARGET.items() <= row.items()
    }
    lines = []
    for model, targets in TARGETS.items():
        for sequences, target in targets.items():
            ms = measured_ms.get((model, sequences))
            ends = ["not measured", ""] if ms is None else [f"{ms:.2f}", _verdict(ms, target)]
            lines.append([model, str(sequences), f"{target:.1f}", *ends])
    return labels.markdown(["model", "sequences", "target, ms", "ms a round", "result"], lines)


def _verdict(ms: float, target: float) -> str:
    return "met" if ms <= target else f"missed by {100 * (ms / target - 1):.0f} %"


def host_table(measured: Sequence[dict]) -> str:
    """Times of a round by model and number of GPUs: in all, of the host's dispatch, and of the kernels of one GPU.

    Raises:
      ConfigError: no row has a time of the host.
    """
    timed = [row for row in measured if row.get("dispatch_us") is not None]
    if not timed:
        raise ConfigError("bench:parallel-host needs rows of decode-step with dispatch_us")
    return _each_device(_host_table)(timed)


def _host_table(timed: Sequence[dict]) -> str:
    columns: tuple[tuple[str, Callable[[dict], str]], ...] = (
        ("sequences", lambda row: str(row["concurrency"])),
        ("ms a round", lambda row: _number(row, "ms_per_round", ".2f")),
        ("dispatch, ms", lambda row: _number(row, "dispatch_us", ".2f", 1e-3)),
        ("kernels of one GPU, ms", lambda row: _number(row, "kernel_us_per_round", ".2f", _each(row))),
        ("GPUs busy", lambda row: _share(row.get("device_busy"))),
    )  # fmt: skip
    lines = [
        [*name, *(text(cells[c]) for _, text in columns)]
        for name, cells in _by_engine(timed)
        for c in sorted(cells)
    ]
    return _part(timed, ["model", "GPUs", *(title for title, _ in columns)], lines)


def texts_table(measured: Sequence[dict]) -> str:
    """Compared and differing tokens, summed over seeds."""
    groups: dict[tuple, list[dict]] = {}
    for row in measured:
        groups.setdefault(tuple(row.get(name) for name in TEXTS_KEY[:-1]), []).append(row)
    lines = []
    for rows in groups.values():
        first, total = rows[0], lambda name, rows=rows: sum(row[name] for row in rows)
        emitted = sum(row["acceptance_length"] * row["rounds"] for row in rows)
        lines.append(
            [
                _name(first),
                str(gpus_of(first)),
                f"{METHOD_NAMES[first['method']]} K={first['num_speculative_tokens']}",
                str(first["concurrency"]),
                f"{total('texts'):,}",
                f"{total('tokens_compared'):,}",
                f"{total('tokens_differing'):,}",
                f"{emitted / total('rounds'):.2f}",
            ]
        )
    header = ["model", "GPUs", "method", "sequences", "texts", "tokens", "differ", "AL"]
    return _part(measured, header, lines)


def _by_engine(measured: Sequence[dict]) -> list[tuple[tuple[str, str], Cells]]:
    """(model and variant, GPUs) with the cells, models in the order of their rows, few GPUs first."""
    cells: dict[tuple, Cells] = {}
    models = list(dict.fromkeys(row["model"] for row in measured))
    variants = list(_VARIANTS)
    order = lambda row: (
        models.index(row["model"]), _gpus(row), row.get("replicas") or 1, variants.index(row.get("variant")),
    )  # fmt: skip
    for row in sorted(measured, key=order):
        name = _name(row), str(_gpus(row))
        cells.setdefault(name, {})[row["concurrency"]] = row
    return list(cells.items())


def _name(row: dict) -> str:
    replicas = row.get("replicas") or 1
    parts = [
        row["model"],
        "fp8 activations" if row.get("activations") == "fp8" else "",
        "sampled" if row.get("temperature") else "",
        f"top-k {row['top_k']}, top-p {row['top_p']:g}" if "top_k" in row else "",
        _VARIANTS[row.get("variant")] if gpus_of(row) > 1 else "",
        f"{replicas} replicas" if replicas > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _gpus(row: dict) -> int:
    """GPUs of all engines of a row."""
    return gpus_of(row) * (row.get("replicas") or 1)


def _part(measured: Sequence[dict], header: list[str], lines: list[list[str]]) -> str:
    device = labels.listed(measured, "device")
    return f"**{device}**; {labels.provenance(measured)}\n\n{labels.markdown(header, lines)}"


def _each(row: dict) -> float:
    """Factor from microseconds of all GPUs together to milliseconds of one."""
    return 1e-3 / gpus_of(row)


def _number(row: dict | None, name: str, form: str, factor: float = 1.0) -> str:
    value = None if row is None else row.get(name)
    return "" if value is None else f"{factor * value:{form}}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


KEYS = {"parallel-step": STEP_KEY, "parallel-lossless": TEXTS_KEY}
"""Fields that identify a row of each kind."""


def _each_device(draw: Callable[[Sequence[dict]], str]) -> Callable[[Sequence[dict]], str]:
    """A table for each kind of device, in the order of their names."""

    def drawn(measured: Sequence[dict]) -> str:
        devices = sorted({row["device"] for row in measured})
        return "\n\n".join(
            draw([row for row in measured if row["device"] == one]) for one in devices
        )

    return drawn


TABLES = {
    "parallel": ("parallel-step", _each_device(rounds_table)),
    "parallel-targets": ("parallel-step", targets_table),
    "parallel-host": ("parallel-step", host_table),
    "parallel-texts": ("parallel-lossless", _each_device(texts_table)),
}
"""Table name -> (kind of rows, function that draws them)."""
