"""`python -m lab.overlap`: word sequences that texts share with HumanEval."""

import pytest

from lab.overlap import grams, human_eval, main, read_texts, shared_grams, wordy

LINE = "return the list of all the words in a text"


def test_grams_are_the_sequences_of_words_and_operators():
    assert grams(["a += b[0]"], 3) == {
        ("a", "+", "="),
        ("+", "=", "b"),
        ("=", "b", "["),
        ("b", "[", "0"),
        ("[", "0", "]"),
    }
    assert grams(["too short"], 3) == set()


def test_shared_grams_occur_on_both_sides_and_count_once():
    texts = [f"x {LINE} y", LINE, "something else"]
    assert shared_grams(texts, grams([f"{LINE}, sorted"])) == {tuple(LINE.split())}
    assert shared_grams(texts, grams(["return the list"])) == set()
    assert shared_grams([], grams([LINE])) == shared_grams([LINE], set()) == set()


def test_wordy_grams_have_six_tokens_with_a_letter():
    operators = ("a", "=", "b", "+", "c", "*", "d", "-", "e", "1")
    assert wordy({operators, (*operators[:-1], "f")}) == {(*operators[:-1], "f")}


def test_the_numbers_are_printed(tmp_path, capsys):
    (tmp_path / "one.py").write_text(human_eval()[0])
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    of_all, found, long = (int(line.split()[-1]) for line in lines[:3])
    assert of_all > found > long > 0
    assert len(lines) == 3 + min(long, 50)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_texts([tmp_path / "missing.py"]))
