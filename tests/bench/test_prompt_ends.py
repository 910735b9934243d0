"""`peagle-bench prompt-ends`: prompts are cut where they should be, and a healed prompt is the same text."""

import random
import re

import pytest

from bench.commands.prompt_ends import ENDS
from bench.prompt_ends import begins_with, cut, cuts, healed
from peagle_jax.cli.loading import embedded
from peagle_jax.text.tokenizer import Tokenizer

TEXT = "".join(f"def name_{i}(value):\n    return value + {i}\n\n\n" for i in range(60))
AFTER = {
    "end of a line": r"\S\n",
    "newline": r"\n",
    "space": r" \S",
    "inside a word": r"\w\w",
    "random character": r"(?s:..)",
}
"""The last character of a prompt and the one after it; for a newline the last character alone."""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(embedded("target"))


@pytest.mark.parametrize("end", ENDS)
def test_prompts_end_where_they_should(end):
    found = cut(TEXT, end, 20, 150, random.Random(0))
    assert len(set(found)) == 20
    for prompt in found:
        assert len(prompt) == 150
        place = TEXT.index(prompt) + len(prompt)
        around = TEXT[place - 1 : place + (end != "newline")]
        assert re.fullmatch(AFTER[end], around), around


def test_all_texts_give_prompts():
    some = cuts([TEXT, "x" * 300, TEXT.upper()], "newline", 31, 80, 0)
    assert len(some) == 31  # the second text has no such place
    assert any(prompt.isupper() for prompt in some)
    assert some == cuts([TEXT, "x" * 300, TEXT.upper()], "newline", 31, 80, 0)


@pytest.mark.parametrize(
    "text", ["def f(x):\n", "def f(x):\n    ret", "return a + ", "x = 'naïve", "é", "y = '漢"]
)
def test_a_healed_prompt_is_the_text_without_its_last_token(text, tokenizer):
    tokens, removed = healed(tokenizer, text)
    assert tokenizer.decode(tokens) + removed == text
    assert tokens == tokenizer.encode(text)[: len(tokens)]
    assert len(tokens) >= 1


def test_answers_begin_with_what_the_prompt_lost():
    pattern = begins_with("\n .*").text
    assert re.fullmatch(
        re.sub(r"\\x\{(\w+)\}", lambda m: rf"\x{int(m[1], 16):02x}", pattern), "\n .*x"
    )
    assert begins_with("") is None
