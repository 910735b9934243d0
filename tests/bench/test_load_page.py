"""The figure of K by load: which lines it has, and which targets count as missed."""

import pytest

from bench import load_page, plots, report
from tests.bench.test_report import row


def step(method: str, k: int, speed: float, adaptive: str = "off", concurrency: int = 32) -> dict:
    more = {"chosen_num_draft": 5} if adaptive != "off" else {}
    return row(
        "adaptive-step", method, k, adaptive=adaptive, concurrency=concurrency, full_tokens_per_second=speed,
        ms_per_round=8.0, **more,
    )  # fmt: skip


def table(rows: list[dict]) -> str:
    return report.render("load", report.newest(rows))


FIXED = [
    step("none", 0, 1000.0), step("eagle3", 3, 5000.0), step("peagle", 3, 2000.0), step("peagle", 7, 1500.0),
]  # fmt: skip


def test_every_method_and_choice_is_a_line():
    rows = [*FIXED, step("peagle", 7, 1990.0, "load")]
    text = table(rows)
    assert "| P-EAGLE K=3 | 2,000 (8.00 ms) |" in text
    assert "| P-EAGLE K by load | 1,990 (8.00 ms, K=5) |" in text
    assert "| 32 | P-EAGLE K=3, 2,000 | 99.5 % | 199.0 % |  |" in text
    assert {line["method"] for line in plots.shown(report.newest(rows))["load"]} == {
        "none",
        "eagle3",
        "peagle",
    }


@pytest.mark.parametrize(
    ("chosen", "missed"),
    [
        (step("peagle", 7, 1961.0, "load"), ""),
        (step("peagle", 7, 1959.0, "load"), "load: 98% of the best K"),
    ],
)
def test_a_target_that_is_missed_is_named(chosen, missed):
    (line,) = [line for line in table([*FIXED, chosen]).splitlines() if line.startswith("| 32 |")]
    assert line.split("|")[-2].strip() == missed


def test_plain_decoding_may_be_the_best():
    text = table([step("none", 0, 3000.0), *FIXED[2:], step("peagle", 7, 2960.0, "load")])
    assert "| 32 | plain, 3,000 | 98.7 % | 98.7 % | load: 99% of plain |" in text


def test_concurrencies_without_a_fixed_k_are_left_out():
    rows = [*FIXED, step("none", 0, 10.0, concurrency=64), step("peagle", 7, 9.0, "load", 64)]
    assert "\n| 64 |" not in table(rows)


def test_texts_of_equal_length_weigh_as_many_rounds_as_they_take(monkeypatch):
    """A text of 7 accepted drafts a round and one of none: 8 tokens take 1 and 8 rounds, so 16 tokens 9 rounds."""
    texts = [[7, 7], [0] * 16]
    monkeypatch.setattr(load_page, "accepted_by_text", lambda *_: texts)
    assert load_page.mean_length("headroom.jsonl", "two", 7, at_least=7) == pytest.approx(16 / 9)


def test_a_fixed_k_has_the_mean_acceptance_of_all_texts():
    """Few requests draw few of the texts: two cells with equal rounds would differ by their luck."""
    drawn = dict(synthetic_acceptance_rows="headroom.jsonl", synthetic_acceptance_set="own")
    lucky, unlucky = (step("peagle", 7, counted) | drawn for counted in (9000.0, 1.0))
    assert load_page.speed(lucky) == load_page.speed(unlucky)
    tokens = load_page.mean_length("headroom.jsonl", "own", 7, at_least=7)
    assert 4 < tokens < 5
    assert load_page.speed(lucky) == pytest.approx(32 * tokens / 8e-3)
    smaller = step("peagle", 7, 1.0, "load") | drawn | {"chosen_num_draft": 3}
    assert load_page.speed(smaller) < load_page.speed(lucky)
