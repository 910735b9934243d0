"""`--tensor-parallel`: the same text on several devices."""

import pytest

from tests.cli.test_generate import PROMPT, SHORT

OPTION = "--tensor-parallel"


@pytest.mark.slow
def test_two_devices_write_what_one_writes(generate, folders):
    given = (PROMPT, *folders.options(), *SHORT)
    code, out, _ = generate(*given, OPTION, "2")
    assert code == 0
    assert out == generate(*given)[1]


def test_more_devices_than_there_are_is_one_line(generate, folders, monkeypatch):
    monkeypatch.setattr("peagle_jax.cli.model_folders.check_shares", lambda *given: None)
    code, out, err = generate(PROMPT, *folders.options(), *SHORT, OPTION, "16")
    assert (code, out) == (2, "")
    assert "16 devices are asked for, and there are 8 of cpu" in err
