"""Tables of models on several GPUs, from rows."""

import pytest

from bench import lossless, parallel_page, report
from bench.commands.lossless import Options
from peagle_jax.config import ConfigError

BASE = {
    "device": "Chip", "dtype": "bfloat16", "weights": "fp8", "kv_cache_dtype": "auto", "activations": "bf16",
    "temperature": 0.0, "method": "peagle", "num_speculative_tokens": 7, "max_tokens": 128, "set": "random tokens",
    "date": "2026-01-01", "jax": "0.11.2", "sha": "abc", "layers": 48,
}  # fmt: skip


def step(model: str, gpus: int, concurrency: int, ms: float, **changes) -> dict:
    own = dict(model=model, tensor_parallel=gpus, concurrency=concurrency, ms_per_round=ms)
    return BASE | own | {"kind": "parallel-step"} | changes


def text(seed: int, concurrency: int, differing: int = 0, **changes) -> dict:
    counts = dict(
        texts=10,
        tokens_compared=1000,
        tokens_differing=differing,
        rounds=400,
        acceptance_length=2.5,
    )
    own = dict(
        model="m", tensor_parallel=2, concurrency=concurrency, seed=seed, reference_concurrency=64
    )
    return BASE | counts | own | {"kind": "parallel-lossless"} | changes


STEPS = [
    step("m", 2, 8, 8.72, variant="peers"),
    step("m", 1, 1, 6.18),
    step(
        "m",
        2,
        1,
        7.25,
        variant="peers",
        dispatch_us=5200.0,
        kernel_us_per_round=8000.0,
        device_busy=0.57,
    ),
    step("m", 2, 1, 5.5, variant="captured", dispatch_us=400.0),
    step("other", 2, 1, 9.0),
    step("other", 2, 1, 8.0, variant="peers", activations="fp8"),
    step("other", 2, 1, 9.5, variant="peers", temperature=1.0),
    step("m", 1, 8, 9.4, replicas=2),
    step("m", 1, 8, 10.6, replicas=1),
]


def body(name: str, rows: list[dict]) -> list[list[str]]:
    lines = report.render(name, report.newest(rows)).splitlines()
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in lines if "|" in line]
    return [cells[0], *cells[2:]]


def test_rounds_are_shown_by_model_gpus_and_programs():
    assert body("parallel", STEPS) == [
        ["model", "GPUs", "1 sequence", "8 sequences"],
        ["m", "1", "6.18", "10.60"],
        ["m", "2", "7.25", "8.72"],
        ["m, collectives in the graph (not kept)", "2", "5.50", ""],
        ["m, 2 replicas", "2", "", "9.40"],
        ["other, fp8 activations", "2", "8.00", ""],
        ["other, sampled", "2", "9.50", ""],
        ["other, collectives of the library", "2", "9.00", ""],
    ]


def test_each_kind_of_device_has_a_table_of_its_own():
    """Else the cells of one would take the places of those of the other."""
    other = step("m", 2, 8, 9.9, device="Another chip", dispatch_us=300.0)
    text = report.render("parallel", report.newest([*STEPS, other]))
    first, second = text.split("**Chip**")
    assert "9.90" in first
    assert "Another chip" in first
    assert "8.72" in second
    assert report.render("parallel-host", report.newest([*STEPS, other])).count("**") == 4


def test_targets_are_met_or_missed_by_the_programs_of_the_engine():
    model, other, big = parallel_page.TARGETS
    chip = dict(device="NVIDIA H200")
    own = dict(chip, variant="peers", activations="bf16")
    rows = [
        step(model, 2, 1, 4.9, **own),
        step(model, 2, 8, 8.14, **own),
        step(model, 2, 32, 11.0, **own),
        step(model, 2, 32, 8.0, **(own | dict(activations="fp8"))),
        step(model, 2, 32, 9.0, **(own | dict(variant="captured"))),
        step(other, 1, 1, 1.0, **chip),
    ]
    lines = body("parallel-targets", rows)[1:]
    assert lines[:3] == [
        [model, "1", "5.0", "4.90", "met"],
        [model, "8", "7.4", "8.14", "missed by 10 %"],
        [model, "32", "10.0", "11.00", "missed by 10 %"],
    ]
    assert {one[3] for one in lines[3:]} == {"not measured"}


def test_the_host_is_shown_where_it_was_timed():
    assert body("parallel-host", STEPS)[1:] == [
        ["m", "2", "1", "7.25", "5.20", "4.00", "57 %"],
        ["m, collectives in the graph (not kept)", "2", "1", "5.50", "0.40", "", ""],
    ]
    with pytest.raises(ConfigError, match="dispatch_us"):
        report.render("parallel-host", STEPS[:1])


def test_texts_are_summed_over_seeds_and_a_repeated_seed_counts_once():
    own = dict(variant="peers")
    rows = [text(0, 64, **own), text(1, 64, 3, **own), text(0, 8, **own)]
    rows.append(text(1, 64, 5, date="2026-01-02", **own))
    rows.append(text(0, 8, variant="captured"))
    assert body("parallel-texts", rows)[1:] == [
        ["m", "2", "P-EAGLE K=7", "64", "20", "2,000", "5", "2.50"],
        ["m", "2", "P-EAGLE K=7", "8", "10", "1,000", "0", "2.50"],
        [
            "m, collectives in the graph (not kept)",
            "2",
            "P-EAGLE K=7",
            "8",
            "10",
            "1,000",
            "0",
            "2.50",
        ],
    ]


def test_texts_of_several_devices_are_a_kind_of_their_own():
    """Otherwise the newest of them would take the place of the row of one device in the tables."""
    assert lossless.kind(Options(preset="m")) == "lossless"
    assert lossless.kind(Options(preset="m", tensor_parallel=2)) == "parallel-lossless"
