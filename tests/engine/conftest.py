"""Grammars over a tokenizer of single bytes."""

import pytest

from peagle_jax.engine.structured.grammar import Grammars
from tests.serving.scripted import END, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("bytes"), "")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.special_id(END)])
