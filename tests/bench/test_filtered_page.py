"""The table of rounds whose requests draw from a part of the vocabulary."""

from bench import report


def row(requests: int, top_k: int, top_p: float, ms: float, sha: str = "aaa", **changes) -> dict:
    return dict(
        kind="filtered-step", device="NVIDIA H200", model="m", method="peagle", num_speculative_tokens=7,
        concurrency=requests, top_k=top_k, top_p=top_p, ms_per_round=ms, sha=sha, jax="0.11.2",
        date="2026-01-01", **changes,
    )  # fmt: skip


def test_filters_of_a_commit_stand_beside_each_other():
    measured = [row(8, 0, 1.0, 10.0), row(8, 20, 0.8, 13.0), row(8, 20, 0.8, 11.0, sha="bbb")]
    text = report.render("filtered", report.newest(measured))
    assert "| commit | method | requests | no filter | top-k 20, top-p 0.8 |" in text
    assert "| aaa | P-EAGLE K=7 | 8 | 10.00 | 13.00 |" in text
    assert "| bbb | P-EAGLE K=7 | 8 |  | 11.00 |" in text


def test_a_repeat_replaces_its_row():
    text = report.render("filtered", report.newest([row(8, 0, 0.9, 10.0), row(8, 0, 0.9, 12.0)]))
    assert "top-p 0.9" in text
    assert "10.00" not in text
    assert "12.00" in text
