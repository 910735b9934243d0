"""Tables of docs/structured.md."""

from bench import structured_page


def test_the_share_of_texts_that_are_cut_off_has_a_column_for_each_white_space():
    row = dict(
        model="m",
        method="none",
        num_draft=0,
        device="cpu",
        schema="s",
        temperature=0.0,
        texts=9,
        max_tokens=5,
    )
    row |= dict(date="2026-01-01", jax="1", sha="abc")
    bounded, free = row | dict(spaces="bounded", cut=0), row | dict(spaces="free", cut=4)
    lines = structured_page.ends_table([bounded, free]).splitlines()
    assert lines[0].endswith("| white space bounded | white space free |")
    assert lines[2].endswith("| s | 0.0 | 0 of 9 | 4 of 9 |")


COMMON = dict(device="H200", date="2026-11-23T00:00:00Z", jax="0.11", sha="abc")


def test_modes_of_a_batch_size_stand_in_one_line():
    row = COMMON | dict(
        model="m", method="peagle", num_draft=7, concurrency=8, mode="free", acceptance_length=4.5, ms_per_round=2.0,
    )  # fmt: skip
    forced = row | dict(mode="forced", acceptance_length=2.5, ms_per_round=2.4, masks_ms=0.25)
    lines = structured_page.rounds_table([row, forced]).splitlines()
    assert lines[2] == "| m, P-EAGLE K=7, H200 | 8 | 4.50, 2.00 |  | 2.50, 2.40 | 0.25 |"
    forced["us_parts"] = {"fetch": 1234.0}
    lines = structured_page.rounds_table([row, forced]).splitlines()
    assert lines[0].endswith("| forced: waiting for the device, ms |")
    assert lines[2].endswith("| 0.25 | 1.23 |")


def test_masks_stand_by_strings_and_number_of_requests():
    row = COMMON | dict(vocab_size=152000, strings="maxLength 16", masks_ms_max=3.0)
    some = [row | dict(concurrency=size, masks_ms=size / 4, cpu_ms=size * 1.5) for size in (1, 8)]
    lines = structured_page.masks_table(some).splitlines()
    assert lines[2] == "| H200, 152,000 tokens: maxLength 16 | 0.25; 3.0 | 2.00; 3.0 | 1.50 |"
