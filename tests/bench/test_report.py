"""Tables and plots from rows."""

import json

import pytest

from bench import headline, plots, report
from bench.__main__ import main
from peagle_jax.cli import plotting
from peagle_jax.config import ConfigError


def row(kind: str, method: str, k: int, **changes) -> dict:
    base = {
        "kind": kind, "device": "Chip", "model": "m", "dtype": "float32", "weights": "float32", "kv_cache_dtype": "auto", "activations": "bf16",
        "temperature": 0.0,
        "set": "HumanEval", "method": method, "num_speculative_tokens": k, "concurrency": 1,
        "prompts": 4, "prompt_tokens": 2048, "max_tokens": 64, "tokens_per_second": 100.0, "ms_per_round": 2.5,
        "ttft_ms_median": 7.0, "acceptance_length": 1.0 + 0.5 * k, "date": "2026-01-01T00:00:00Z",
        "acceptance_per_position": [0.5] * k, "sha": "abc", "jax": "0.11.2",
    }  # fmt: skip
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
    assert report.newest([new, old]) == report.newest([old, new]) == [new]


def test_rows_of_another_device_do_not_replace():
    assert len(report.newest([row("throughput", "none", 0), *ROWS])) == len(ROWS)
    assert len(report.newest([row("throughput", "none", 0, device="B"), *ROWS])) == len(ROWS) + 1


def test_rows_of_other_kinds_are_left_alone():
    assert report.newest([*ROWS, {"kind": "cold-start", "seconds": 1.0}]) == report.newest(ROWS)


def test_masks_by_a_fixed_number_of_threads_do_not_replace_those_of_the_engine():
    one = dict(kind="masks", device="A", vocab_size=9, strings="any", num_draft=7, concurrency=1)
    some = [one | {"date": "2026-01-01"}, one | {"date": "2026-01-02", "threads": 4}]
    assert report.newest(some) == some


def test_quantised_weights_are_a_setting_of_their_own():
    some = report.newest([*ROWS, row("throughput", "none", 0, weights="fp8")])
    assert len(some) == len(ROWS) + 1
    assert "float32 with fp8 weights" in report.render("throughput", some)


def test_a_cache_of_another_format_is_a_setting_of_its_own():
    other = row("throughput", "none", 0, kv_cache_dtype="fp8", weights="mxfp4")
    some = report.newest([*ROWS, other])
    assert len(some) == len(ROWS) + 1
    text = report.render("throughput", some)
    assert "float32 with mxfp4 weights and fp8 KV cache" in text


def test_throughput_is_a_grid_of_methods_and_concurrencies():
    text = report.render("throughput", report.newest(ROWS))
    assert "| concurrency | 1 | 2 |" in text
    assert "| plain | 100 | 1,234 |" in text
    assert "| P-EAGLE K=7 | 300 (3.00x) |  |" in text
    assert text.count("**Chip**") == 1


def test_a_choice_by_load_is_a_line_of_its_own():
    speeds = [280.0, 300.0, 330.0]
    some = [
        row("adaptive", "none", 0, ratio_to_plain=1.0, adaptive="off"),
        row("adaptive", "peagle", 7, tokens_per_second=200.0, ratio_to_plain=2.0, adaptive="off"),
        row("adaptive", "peagle", 7, tokens_per_second=300.0, ratio_to_plain=3.0, adaptive="load",
            tokens_per_second_of_repeats=speeds),
    ]  # fmt: skip
    measured = report.newest([*some, *ROWS])
    text = report.render("adaptive", measured)
    assert "| plain | 100 |" in text
    assert "| P-EAGLE K=7 | 200 (2.00x) |" in text
    assert "| P-EAGLE K by load | 300 (3.00x); 280 to 330 |" in text
    assert "by load" not in report.render("throughput", measured)
    assert plots.shown(measured)["adaptive"] == some


def test_decode_step_rows_show_their_floor():
    model = {"model": "coder-fp8", "weights": "fp8", "temperature": 1.0}
    some = [
        row("decode-step", "peagle", 7, **model, ms_per_round=8.0, floor_ms=4.0,
            fraction_of_floor=0.5, synthetic_acceptance_length=3.1),
        row("decode-step", "peagle", 7, **model, prompt_tokens=65536, ms_per_round=9.0,
            floor_ms=5.0, fraction_of_floor=0.6, synthetic_acceptance_length=3.1),
        row("decode-step", "none", 0, **model, floor_ms=None, fraction_of_floor=None,
            synthetic_acceptance_length=None),
    ]  # fmt: skip
    text = report.render("decode-step", report.newest([*some, *ROWS]))
    assert "model coder-fp8, float32 with fp8 weights, temperature 1.0" in text
    assert "| P-EAGLE K=7 | 512 | 1 | 3.1 | 8.00 | 4.00 | 50 % | 4.50 | 100 | 7 |" in text
    assert "| P-EAGLE K=7 | 16,384 | 1 | 3.1 | 9.00 | 5.00 | 60 % | 4.50 | 100 | 7 |" in text
    assert "| plain | 512 | 1 |  | 2.50 |  |  |" in text


def test_lossless_rows_are_counted_together():
    counts = dict(tokens_compared=1500, tokens_differing=0, reference_concurrency=32)
    some = [
        row("lossless", "none", 0, **counts),
        row("lossless", "peagle", 7, **counts),
        row("lossless", "peagle", 7, **counts | {"tokens_differing": 9, "concurrency": 32}),
        row("lossless", "peagle", 7, **counts, model="other"),
    ]
    text = report.render("lossless", report.newest([*some, *ROWS]))
    assert "model m, float32, greedy, 64 new tokens" in text
    assert "| concurrency | 1 | 32 |" in text
    assert "| plain | 0 of 1,500 (AL 1.00) |  |" in text
    assert "| P-EAGLE K=7 | 0 of 1,500 (AL 4.50) | 9 of 1,500 (AL 4.50) |" in text
    assert "Beside plain decoding at concurrency 32: 9 of 4,500 tokens differ." in text
    assert "0 of 1,500 tokens differ." in text


def test_kernels_have_a_table_without_compared_configs():
    base = {
        "kind": "kernel",
        "device": "Chip",
        "op": "moe",
        "config": None,
        "us": 12.34,
        "sha": "abc",
    }
    base |= {"bytes_per_second": 3.5e12, "fraction_of_bandwidth": 0.8, "jax": "0.11.2"}
    compared = {"reference_us": 24.68, "speedup": 2.0}
    one = base | compared | {"spec": "one", "date": "2026-01-02T00:00:00Z"}
    older = one | {"us": 99.0, "date": "2026-01-01T00:00:00Z"}
    other = one | {"config": "stages=4", "spec": "other"}
    alone = one | {"spec": "alone", "reference_us": None, "speedup": None}
    text = report.render("kernels", report.newest([*ROWS, one, older, other, alone]))
    assert "| moe | one | 12.3 | 3.50 | 80 % | 24.7 | 2.0 |" in text
    assert "| moe | alone | 12.3 | 3.50 | 80 % |  |  |" in text
    assert "other" not in text
    assert "99.0" not in text
    assert "**Chip**; jax 0.11.2, commit abc, 2026-01-02" in text


def test_acceptance_has_a_column_per_position():
    text = report.render("acceptance", report.newest(ROWS))
    assert "| prompts | method | K | AL | 1 | 2 | 3 | 4 | 5 | 6 | 7 |" in text
    assert "| HumanEval (4) | EAGLE-3 | 3 | 2.50 | 0.50 | 0.50 | 0.50 |  |  |  |  |" in text


def test_only_marked_blocks_change_and_drawing_again_changes_nothing():
    text = (
        "before\n<!-- bench:throughput -->\nold\n<!-- /bench:throughput -->\nbetween\n"
        "<!-- bench:rounds -->\n<!-- /bench:rounds -->\nafter\n"
    )
    some = report.newest(ROWS)
    drawn = report.update_markdown(text, some)
    assert drawn.startswith("before\n<!-- bench:throughput -->\n")
    assert drawn.endswith("<!-- /bench:rounds -->\nafter\n")
    assert "old" not in drawn
    assert "\nbetween\n" in drawn
    assert report.update_markdown(drawn, some) == drawn


def test_a_marker_for_what_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="unknown table bench:speed"):
        report.render("speed", ROWS)
    with pytest.raises(ConfigError, match="needs acceptance rows"):
        report.render("acceptance", ROWS[:3])


def test_report_writes_readme_and_plots(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:throughput -->\n<!-- /bench:throughput -->\n")
    written = report.report(tmp_path, [readme], tmp_path)
    assert [path.rsplit("/", 1)[1] for path in written] == [
        "README.md",
        "throughput.png",
        "acceptance.png",
    ]
    assert "1,234" in readme.read_text()
    first = (tmp_path / "throughput.png").read_bytes()
    report.report(tmp_path, [], tmp_path)
    assert (tmp_path / "throughput.png").read_bytes() == first


def shape(method: str, k: int, concurrency: int, **changes) -> dict:
    return row(
        "decode-step", method, k, model=headline.SHAPE, weights="fp8", temperature=1.0, concurrency=concurrency,
        synthetic_acceptance_length=headline.SYNTHETIC if k else None, decode_tokens_per_second=10.0 * k + 5,
        prefill_ms=20.0, floor_ms=None, fraction_of_floor=None, **changes,
    )  # fmt: skip


def reference(method: str, k: int, concurrency: int) -> dict:
    return {
        "kind": "reference", "engine": "Other 1.0", "device": "Chip", "model": headline.SHAPE, "method": method,
        "num_speculative_tokens": k, "concurrency": concurrency, "ms_per_round": 4.0, "prefill_ms": None,
        "approximate": k == 0,
    }  # fmt: skip


SHAPES = [
    shape("none", 0, 1),
    shape("peagle", 7, 1),
    shape("peagle", 7, 128),
    shape("eagle3", 3, 1),
]
SHAPES[-1]["synthetic_acceptance_length"] = 2.5


def test_the_readme_shows_equal_acceptance_where_plain_decoding_has_a_row():
    chosen = headline.shape_rows(report.newest([*SHAPES, *ROWS]))
    points = [(one["method"], one["concurrency"]) for one in chosen]
    assert points == [("none", 1), ("peagle", 1)]


def test_rows_of_another_engine_stand_in_brackets():
    others = [reference("none", 0, 1), reference("peagle", 7, 1), reference("peagle", 5, 1)]
    text = report.render("beside", report.newest([*SHAPES, *others]))
    assert "| ms, in brackets Other 1.0 | concurrency 1 |" in text
    assert "| plain, round | 2.50 (about 4.00) |" in text
    assert "| P-EAGLE K=7, round | 2.50 (4.00) |" in text
    assert "K=5" not in text


def test_the_headline_has_the_longest_drafts_and_their_fresh_rounds():
    fresh = dict(fresh_acceptance_length=3.25)
    some = [row("acceptance", "peagle", k) for k in (3, 7)]
    some += [row("headroom", method, k, **fresh) for method in ("eagle3", "peagle") for k in (3, 7)]
    text = report.render("headline", report.newest(some))
    assert "**4.50 tokens per round instead of 1** (3.25 in rounds whose last 8 tokens are" in text
    assert text.count("3.25") == 1
    assert "not a repeat" not in report.render("headline", report.newest(some[:2]))


@pytest.mark.parametrize("name", ["shape", "beside", "headline"])
def test_blocks_of_the_readme_need_their_rows(name):
    some = report.newest([shape("peagle", 7, 1), row("acceptance", "eagle3", 3)])
    with pytest.raises(ConfigError, match=f"bench:{name} needs"):
        report.render(name, some)


def test_a_page_without_rows_leaves_the_other_pages_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- bench:throughput -->\n<!-- /bench:throughput -->\n")
    bad.write_text("<!-- bench:kernels -->\n<!-- /bench:kernels -->\n")
    before = good.read_text()
    with pytest.raises(ConfigError, match="bench:kernels needs kernel rows"):
        report.report(tmp_path, [good, bad], tmp_path)
    assert good.read_text() == before


def train_step_row(tokens, texts):
    """A step whose memory XLA did not report, as on CPUs of some versions."""
    return ROWS[0] | dict(
        kind="train-step", form="texts", texts=texts, tokens=tokens, options="", memory_gib=None,
        ms_per_step=35.0,
    )  # fmt: skip


def ablation_row(steps: int, num_draft: int) -> dict:
    lengths = dict(acceptance_length=3.0, fresh_acceptance_length=2.5)
    fields = dict(cell="mixed", steps=steps, num_draft=num_draft, options="--method peagle")
    return ROWS[0] | dict(kind="ablation", sets=dict(own=lengths), **fields)


def test_a_plot_holds_the_digest_of_its_rows(tmp_path):
    by_load = [
        row("adaptive", "peagle", 7, adaptive="load"),
        row("adaptive-step", "peagle", 7, adaptive="load", full_tokens_per_second=9.0),
    ]
    lengths = [train_step_row(tokens, 64 * 512 // tokens) for tokens in (512, 4096)]
    cells = [ablation_row(*given) for given in ((100, 5), (200, 5), (200, 7))]
    served = row(
        "served", "peagle", 7, model=headline.SHAPE, protocol="grpc", rate=None, duration=None, prompt_tokens=512,
        synthetic_acceptance_length=3.1, bare_tokens_per_second=110.0, served_over_bare=0.9, api_processes=1,
    )  # fmt: skip
    others = [*by_load, reference("peagle", 7, 1), *lengths, *cells, served]
    some = report.newest([*SHAPES, *ROWS, *others])
    plots.draw(some, tmp_path)
    shown = plots.shown(some)
    assert set(shown) == set(plots.PLOTS)
    assert shown["ablations"] == [cells[-1]], "one series: the most steps, the largest K"
    for name, own in shown.items():
        assert plots.digest_of(tmp_path / f"{name}.png") == plots.digest(own)
    changed = [one | {"tokens_per_second": 1.0} for one in shown["throughput"]]
    assert plots.digest(changed) != plots.digest(shown["throughput"])


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    monkeypatch.setattr(plotting, "installed", lambda: False)
    assert main(["report", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "install 'peagle-jax[plots]'" in error
    assert error.count("\n") == 1
