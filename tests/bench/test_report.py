"""Tables and the plot from rows."""

import json
import re

import pytest

from bench import report
from bench.__main__ import main
from peagle_jax.cli import plotting
from peagle_jax.config import ConfigError


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
    assert "**Chip**, m, float32, greedy; jax 0.11.2, commit abc, 2026-01-01" in text
    assert "float32 with mxfp4 weights and fp8 KV cache" in text


def test_throughput_is_a_grid_of_methods_and_concurrencies():
    text = report.render("throughput", report.newest(ROWS))
    assert "| tokens/s | concurrency 1 | concurrency 2 |" in text
    assert "| plain | 100 | 1,234 |" in text
    assert "| P-EAGLE K=7 | 300 (3.00x) |  |" in text
    assert text.count("**Chip**") == 1


def test_rounds_show_their_floor_where_it_is_known():
    model = {"model": "coder-fp8", "weights": "fp8", "temperature": 1.0}

    def step(method: str, k: int, ms: float, share: float | None, length: float | None, **others):
        figures = dict(fraction_of_floor=share, synthetic_acceptance_length=length)
        return row("decode-step", method, k, **model, ms_per_round=ms, **figures, **others)

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
        chosen = report.chosen_rows(name, report.newest(report.rows.read(ROW_FILES)))
        assert chosen, name
        facts = report.Facts(chosen)
        for part in re.findall(r"{(\w+)", json.dumps(table)):
            if part not in ("about", "served_over_bare"):
                assert any(report.Facts([row])[part] is not None for row in chosen) or (
                    facts[part] is not None
                ), (name, part)


ROW_FILES = sorted(report.RESULTS.glob("*.jsonl"))


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


def test_a_page_without_rows_leaves_the_other_pages_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- bench:throughput -->\n<!-- /bench:throughput -->\n")
    bad.write_text("<!-- bench:kernels -->\n<!-- /bench:kernels -->\n")
    before = good.read_text()
    with pytest.raises(ConfigError, match="bench:kernels needs kernel rows"):
        report.report(tmp_path, [good, bad], tmp_path)
    assert good.read_text() == before


LOAD = dict(protocol="grpc", rate=None, duration=None, prompt_tokens=512, codes={}, api_processes=1)
SPEEDS = dict(bare_tokens_per_second=110.0, served_over_bare=0.9, synthetic_acceptance_length=3.1)
SERVED = row("served", "peagle", 7, model="qwen3-coder-30b-a3b-fp8", **LOAD, **SPEEDS)


def test_the_plot_holds_the_digest_of_its_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(SERVED) + "\n")
    assert report.report(tmp_path, [], tmp_path) == [str(tmp_path / "served.png")]
    own = report.chosen_rows("served-speed", report.newest([SERVED]))
    first = (tmp_path / "served.png").read_bytes()
    assert report.digest_of(tmp_path / "served.png") == report.digest(own)
    report.report(tmp_path, [], tmp_path)
    assert (tmp_path / "served.png").read_bytes() == first
    assert report.digest([own[0] | {"tokens_per_second": 1.0}]) != report.digest(own)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(SERVED) + "\n")
    monkeypatch.setattr(plotting, "installed", lambda: False)
    assert main(["report", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "install 'peagle-jax[plots]'" in error
    assert error.count("\n") == 1
