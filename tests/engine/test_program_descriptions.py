"""Descriptions of what programs are made of: equal for equal things, different for others."""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import EngineConfig
from peagle_jax.engine.device import program_descriptions
from peagle_jax.engine.device.program_descriptions import NotDescribed, describe, describe_tree
from peagle_jax.method.drafter import make_drafter
from peagle_jax.method.verify import verify, verify_blocks
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


def test_descriptions_tell_values_apart():
    config = EngineConfig(num_draft=2, max_num_seqs=1, max_model_len=64, page_size=4)
    values = [
        *(1, 1.0, True, "1", b"1", None, ..., int, float, (1,), [1], {"a": 1}, {"a": 1.0}, {1}),
        *(np.dtype("int32"), np.float32(1), np.int32(1), jnp.float32, jax.nn.silu, jax.nn.gelu),
        *(partial(verify, 1), partial(verify, a=1), verify, verify_blocks),
        *(config, replace(config, page_size=8), tiny.TARGET, tiny.HEAD),
    ]
    texts = [describe(value) for value in values]
    assert len(set(texts)) == len(values)
    assert not any("0x" in text for text in texts)
    for value in (lambda: 1, object(), test_descriptions_tell_values_apart):
        with pytest.raises(NotDescribed):
            describe(value)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_trees_of_all_families_are_described(family):
    target, found = tiny.target(**tiny.FAMILIES[family]), set()
    for method in ("peagle", "eagle3", "dflash"):
        drafter = make_drafter(tiny.head(method), 2, "argmax")
        found.add(describe_tree(jax.tree.structure((target, drafter))))
    assert len(found) == 3
    assert not any("0x" in text for text in found)
