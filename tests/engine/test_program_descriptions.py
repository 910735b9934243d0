"""Descriptions of what programs are made of: equal for equal things, different for others."""

import sys

import jax
import pytest

from peagle_jax.engine.device import program_descriptions
from peagle_jax.engine.device.program_descriptions import describe_tree
from peagle_jax.method.drafter import make_drafter
from tests import tiny


def test_every_source_file_counts(tmp_path, monkeypatch):
    package = tmp_path / "made_up"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/one.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(program_descriptions, "PACKAGES", ("made_up",))
    digest = program_descriptions.sources.__wrapped__
    found = {digest()}
    (package / "inner/one.py").write_text("x = 2\n")
    found.add(digest())
    (package / "inner/one.py").rename(package / "inner/two.py")
    found.add(digest())
    (package / "notes.txt").write_text("no code")
    assert digest() in found
    assert len(found) == 3
    sys.modules.pop("made_up", None)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_trees_of_all_families_are_described(family):
    target, found = tiny.target(**tiny.FAMILIES[family]), set()
    for method in ("peagle", "eagle3"):
        drafter = make_drafter(tiny.head(method), 2, "argmax")
        found.add(describe_tree(jax.tree.structure((target, drafter))))
    assert len(found) == 2
    assert not any("0x" in text for text in found)
