"""The command line of lab."""

import shlex

import pytest

from lab.__main__ import PROGRAM


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_examples_are_valid(name):
    for example in PROGRAM.load(name).examples:
        _, options = PROGRAM.parse(shlex.split(example))
        options.check()
        hash(options)


def test_flags_that_default_to_true_can_be_turned_off():
    _, found = PROGRAM.parse(["hostile", "--no-together", "--", "--max-num-seqs", "4"])
    assert (found.together, found.serve_options) == (False, ("--max-num-seqs", "4"))
