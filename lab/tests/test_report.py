"""Tables and the plot from rows."""

import json
import re

import pytest

from lab import report
from peagle_jax.config import ConfigError
from tests.test_pages import PAGES


def row(kind: str, method: str, k: int, **changes) -> dict:
    base = dict(kind=kind, method=method, num_speculative_tokens=k, concurrency=1, temperature=0.0)
    base |= dict(device="Chip", model="m", dtype="float32", weights="float32", set="HumanEval")
    base |= dict(kv_cache_dtype="auto", activations="bf16", date="2026-01-01T00:00:00Z")
    base |= dict(prompts=4, prompt_tokens=2048, max_tokens=64, tokens_per_second=100.0)
    base |= dict(ms_per_round=2.5, ttft_ms_median=7.0, acceptance_length=1.0 + 0.5 * k)
    base |= dict(acceptance_per_position=[0.5] * k, sha="abc", jax="0.11.2")
    return base | changes


ROWS = [
    row("throughput", "peagle", 7, tokens_per_second=300.0, ratio_to_plain=3.0),
    row("throughput", "none", 0, ratio_to_plain=1.0),
    row("throughput", "none", 0, concurrency=2, tokens_per_second=1234.0),
    row("acceptance", "eagle3", 3),
    row("acceptance", "peagle", 7, set="MT-Bench"),
]


def test_the_newest_row_of_a_measurement_counts():
    old, new = (row("throughput", "none", 0, date=f"2026-01-0{day}", x=day) for day in (1, 2))
    for some in ([new, old], [old, new]):
        assert [one["x"] for one in report.newest(some)] == [2]


@pytest.mark.parametrize(
    "changes", [{"device": "B"}, {"weights": "fp8"}, {"concurrency": 4}, {"activations": "fp8"}]
)
def test_rows_of_another_measurement_do_not_replace(changes):
    some = report.newest([row("throughput", "none", 0, **changes), *ROWS])
    assert len(some) == len(ROWS) + 1


def test_rows_of_other_kinds_are_left_alone():
    assert report.newest([*ROWS, {"kind": "cold-start", "seconds": 1.0}]) == report.newest(ROWS)


def test_number_formats_are_in_the_title():
    other = row("throughput", "none", 0, kv_cache_dtype="fp8", weights="mxfp4")
    text = report.render("throughput", report.newest([*ROWS, other]))
    assert "**Chip**, m, float32, greedy, HumanEval; jax 0.11.2, commit abc, 2026-01-01" in text
    assert "float32 with mxfp4 weights and fp8 KV cache" in text


def test_throughput_is_a_grid_of_methods_and_concurrencies():
    text = report.render("throughput", report.newest(ROWS))
    assert "| tokens/s, by concurrency | 1 | 2 |" in text
    assert "| plain | 100 | 1,234 |" in text
    assert "| P-EAGLE K=7 | 300 (3.00x) |  |" in text
    assert text.count("**Chip**") == 1


def test_rounds_show_their_floor_where_it_is_known():
    model = {"model": "coder-fp8", "weights": "fp8", "temperature": 1.0}

    def step(method: str, k: int, ms: float, share: float | None, length: float | None, **others):
        figures = dict(fraction_of_floor=share, synthetic_acceptance_length=length)
        figures |= dict(ms_per_round=ms, decode_tokens_per_second=100.0)
        return row("decode-step", method, k, **model, **figures, **others)

    some = [
        step("peagle", 7, 8.0, 0.5, 3.1),
        step("peagle", 7, 9.0, 0.6, 3.1, prompt_tokens=65536),
        step("peagle", 7, 7.0, None, 2.5),
        step("none", 0, 2.5, None, None),
    ]
    text = report.render("rounds", report.newest([*some, *ROWS]))
    assert "coder-fp8, float32 with fp8 weights, temperature 1, 512 prompt tokens;" in text
    assert "| P-EAGLE K=7 | 8.00 (100; 50%) |" in text
    assert "16,384 prompt tokens" in text
    assert "| P-EAGLE K=7 | 9.00 (100; 60%) |" in text
    assert "| plain | 2.50 (100) |" in text
    assert "7.00" not in text, "another synthetic acceptance"


def test_lossless_rows_are_counted_together():
    counts = dict(tokens_compared=1500, tokens_differing=0)
    some = report.newest(
        [
            row("lossless", "none", 0, **counts),
            row("lossless", "peagle", 7, **counts),
            row("lossless", "peagle", 7, **counts | {"tokens_differing": 9, "concurrency": 32}),
            row("lossless", "peagle", 7, **counts, model="other"),
        ]
    )
    text = report.render("lossless", some)
    assert "| m, float32 | Chip | plain, P-EAGLE K=7 | 1 to 32 | 4,500 | 9 | abc, 2026" in text
    assert "| other, float32 | Chip | P-EAGLE K=7 | 1 to 1 | 1,500 | 0 |" in text
    assert report.render("lossless-sum", some).startswith("6,000 greedy tokens of 2 models")


def test_kernels_have_a_line_for_each_operation_without_compared_configs():
    base = dict(kind="kernel", device="Chip", op="moe", config=None, us=12.34, sha="abc")
    base |= {"fraction_of_bandwidth": 0.8, "jax": "0.11.2", "speedup": 2.0}
    one = base | {"spec": "one", "date": "2026-01-02T00:00:00Z"}
    older = one | {"us": 99.0, "date": "2026-01-01T00:00:00Z"}
    other = one | {"config": "stages=4", "spec": "other", "us": 88.0}
    alone = one | {"spec": "alone", "us": 30.0, "speedup": None}
    fast = one | {"spec": "fast", "speedup": 6.0}
    text = report.render("kernels", report.newest([*ROWS, one, older, other, alone, fast]))
    assert "| moe | 3 | 12.3 to 30.0 | 80% | 4.0 | 2.0 | 6.0 |" in text


def test_acceptance_has_a_column_per_position():
    text = report.render("acceptance", report.newest(ROWS))
    assert "| prompts | method | AL | 1 | 2 | 3 | 4 | 5 | 6 | 7 |" in text
    assert "| HumanEval (4) | EAGLE-3 K=3 | 2.50 | 0.50 | 0.50 | 0.50 |  |  |  |  |" in text


def test_every_field_of_a_table_is_one_that_rows_have():
    """A typing error in the file would leave a column empty."""
    for name, table in report.TABLES.items():
        chosen = report.chosen_rows(name, report.stored())
        assert chosen, name
        facts = report.Facts(chosen)
        for part in re.findall(r"{(\w+)", json.dumps(table)):
            if part not in ("about", "served_over_bare"):
                assert any(report.Facts([row])[part] is not None for row in chosen) or (
                    facts[part] is not None
                ), (name, part)


def test_only_marked_blocks_change_and_drawing_again_changes_nothing():
    text = (
        "before\n<!-- bench:throughput -->\nold\n<!-- /bench:throughput -->\nbetween\n"
        "<!-- bench:acceptance -->\n<!-- /bench:acceptance -->\nafter\n"
    )
    some = report.newest(ROWS)
    drawn = report.update_markdown(text, some)
    assert drawn.startswith("before\n<!-- bench:throughput -->\n")
    assert drawn.endswith("<!-- /bench:acceptance -->\nafter\n")
    assert "old" not in drawn
    assert "\nbetween\n" in drawn
    assert report.update_markdown(drawn, some) == drawn


def test_a_marker_for_what_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="unknown table bench:speed"):
        report.render("speed", ROWS)
    with pytest.raises(ConfigError, match="needs acceptance rows"):
        report.render("acceptance", ROWS[:3])


def served(protocol: str, concurrency: int, speed: float, **changes) -> dict:
    model = dict(model="qwen3-coder-30b-a3b-fp8", prompt_tokens=512)
    load = dict(protocol=protocol, concurrency=concurrency, rate=None, duration=None)
    speeds = dict(tokens_per_second=speed, bare_tokens_per_second=1000.0)
    start = dict(port_seconds=9.0, serving_seconds=20.0, programs_seconds=21.0)
    found = row("served", "peagle", 7, **model, **load, **speeds, **start)
    found |= dict(synthetic_acceptance_length=3.1, served_over_bare=speed / 1000)
    found |= dict(codes={"OK": 32}, programs_on_disk=4)
    found["processes"] = [{"role": "engine", "resident_mib": 2048.0, "cpu_seconds": 1.0}]
    figures = {"p50": 1.0, "p99": 2.0, "max": 3.0}
    return found | dict(ttft_ms=figures, tpot_ms=figures, gap_ms=figures) | changes


SERVED = [served("grpc", 8, 970.0), served("http", 8, 950.0), served("http", 32, 940.0)]


def test_served_rows_have_a_table_and_stand_in_the_readme():
    measured = report.newest([*SERVED, served("grpc", 8, 500.0, date="2025-01-01T00:00:00Z")])
    text = report.render("served", measured)
    assert "| 8 requests | gRPC | 970 | 0.97 | 1, 2 | 1.0, 2.0 | 1, 2, 3 | 32 OK |" in text
    starts = report.render("served-starts", measured)
    assert "| qwen3-coder-30b-a3b-fp8 | 4 | 9 | 21 | engine 2,048 MiB |" in starts
    text = report.render("served-speed", measured)
    assert "| bare engine | 1,000 | 1,000 |" in text
    assert "| served by gRPC (of bare) | 970 (0.97) |  |" in text
    assert "| served by HTTP (of bare) | 950 (0.95) | 940 (0.94) |" in text
    assert "served.png" in report.render("served-figure", measured)


def test_loads_of_other_kinds_are_lines_but_not_in_the_readme():
    mixed, timed = served("grpc", 128, 900.0, duration=200), served("grpc", None, 800.0, rate=9.0)
    others = report.newest([mixed, timed, served("http", 8, 950.0)])
    text = report.render("served", others)
    assert "| 128 requests, mixed lengths for 200 s | gRPC | 900 |" in text
    assert "| 9 requests/s | gRPC |" in text
    assert [one["protocol"] for one in report.chosen_rows("served-speed", others)] == ["http"]


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_rows(page):
    text = page.read_text(encoding="utf-8")
    assert report.update_markdown(text, report.stored()) == text, "run python -m lab report"


def test_report_draws_every_page_that_has_blocks():
    found = {page for page in PAGES if report.marked(page.read_text(encoding="utf-8"))}
    assert found == set(report.PAGES)


@pytest.mark.parametrize("name", report.PLOTS)
def test_the_plots_are_those_of_the_rows(name):
    own = report.chosen_rows(report.PLOTS[name], report.stored())
    assert report.digest_of(report.RESULTS / name) == report.digest(own), "run python -m lab report"


def test_the_plot_holds_the_digest_of_its_rows(tmp_path):
    own, file = report.chosen_rows("served-speed", report.newest(SERVED)), tmp_path / "served.png"
    report.plot(own, file)
    first = file.read_bytes()
    assert report.digest_of(file) == report.digest(own)
    report.plot(own, file)
    assert file.read_bytes() == first
    assert report.digest([own[0] | {"tokens_per_second": 1.0}]) != report.digest(own)
