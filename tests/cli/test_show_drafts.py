"""`--show-drafts` marks tokens by their fate, and `--compare` draws its table as it runs."""

import io
import re

import pytest

from peagle_jax.cli.draft_marks import Fate, MarkedText, fates, legend, mark_for
from peagle_jax.engine.host.request import Round
from peagle_jax.text.tokenizer import Tokenizer
from tests.cli.test_generate import PROMPT, SHORT

MARKED = re.compile(r"\[(.*?)\]|\{-(.*?)-\}|\{\+(.*?)\+\}|\((.*?)\)", re.DOTALL)


class Terminal(io.StringIO):
    """Text that a terminal would show."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tokenizer(folders) -> Tokenizer:
    return Tokenizer(folders.target)


def test_fates_follow_from_the_round():
    assert fates(None, 1) == [Fate.PLAIN]
    assert fates(Round([], 0, 1), 1) == [Fate.PLAIN]
    assert fates(Round([7, 8, 9], 1, 2), 2) == [Fate.ACCEPTED, Fate.CORRECTION]
    assert fates(Round([7, 8], 2, 3), 3) == [Fate.ACCEPTED, Fate.ACCEPTED, Fate.BONUS]
    assert fates(Round([7, 8], 2, 2), 2) == [Fate.ACCEPTED] * 2  # the text ended on a draft


@pytest.mark.parametrize(
    ("stream", "environ", "wanted"),
    [
        (io.StringIO(), {}, "{+x+}"),
        (Terminal(), {"TERM": "dumb"}, "{+x+}"),
        (Terminal(), {}, "\x1b[1;33mx\x1b[0m"),
        (Terminal(), {"NO_COLOR": ""}, "\x1b[1;33mx\x1b[0m"),
        (Terminal(), {"NO_COLOR": "1"}, "\x1b[1mx\x1b[0m"),
    ],
)
def test_marks_fit_the_stream(stream, environ, wanted):
    mark = mark_for(stream, environ)
    assert mark("x", Fate.CORRECTION) == wanted
    assert mark("x", Fate.PLAIN) == "x"
    marked = {mark("x", fate) for fate in Fate}
    assert len(marked) == len(Fate)
    assert ("\x1b" in legend(stream, environ)) is False
    assert all(fate.value in legend(stream, environ) for fate in Fate if fate is not Fate.PLAIN)


def updates(tokens: list[int], wrong: int):
    """A token by prefill, then rounds of two tokens: a draft that passes, one that does not."""
    yield tokens[:1], None
    for place in range(1, len(tokens), 2):
        pair = tokens[place : place + 2]
        yield pair, Round([pair[0], wrong], 1, len(pair))


@pytest.mark.parametrize("stops", [(), ("xs):",), ("quick", "zzz")])
def test_without_its_marks_the_text_is_the_text(tokenizer, stops):
    text = 'def quicksort(xs):\n    """Sörts — xs."""\n    return xs'
    tokens, wrong = tokenizer.encode(text), tokenizer.encode("#")[0]
    plain, marked = MarkedText(tokenizer, None, stops), MarkedText(tokenizer, Mark(), stops)
    found = {"plain": "", "marked": ""}
    all_updates = list(updates(tokens, wrong))
    for place, (fresh, round) in enumerate(all_updates):
        is_last = place == len(all_updates) - 1
        found["plain"] += plain.add(fresh, round, is_last=is_last)
        found["marked"] += marked.add(fresh, round, is_last=is_last)
    ends = [text.index(stop) for stop in stops if stop in text]
    assert found["plain"] == text[: min(ends, default=None)]
    kinds = Mark.kinds(found["marked"])
    assert "".join(piece for kind, piece in kinds if kind != "REFUSED") == found["plain"]
    assert {kind for kind, _ in kinds} >= {"PLAIN"}
    if not stops:
        accepted = [piece for kind, piece in kinds if kind == "ACCEPTED"]
        assert "".join(accepted).encode() or accepted == []
        refused = [piece for kind, piece in kinds if kind == "REFUSED"]
        assert set(refused) == {"#"}
        assert len(refused) == len(tokens[2::2])


class Mark:
    """Marks that a test can read back, whatever the text."""

    def __call__(self, text: str, fate: Fate) -> str:
        return f"\x02{fate.name}\x03{text}\x04"

    @staticmethod
    def kinds(marked: str) -> list[tuple[str, str]]:
        found = re.findall("\x02([A-Z]+)\x03(.*?)\x04", marked, re.DOTALL)
        assert re.sub("\x02([A-Z]+)\x03(.*?)\x04", "", marked, flags=re.DOTALL) == ""
        return found


def test_the_command_marks_what_it_writes(generate, folders):
    plain = generate(PROMPT, *folders.options(), *SHORT)[1]
    code, out, err = generate(PROMPT, *folders.options(), *SHORT, "--show-drafts")
    assert code == 0
    assert "{+" in out  # a random head drafts nonsense
    written = MARKED.sub(
        lambda found: found[1] or found[3] or found[4] or "", out.removeprefix(PROMPT)
    )
    continued = plain.removeprefix(PROMPT)
    assert re.sub(r"[\[\](){}+-]", "", written) == re.sub(r"[\[\](){}+-]", "", continued)
    assert "{+the target's token in its place+}" in err


@pytest.mark.parametrize("other", [["--json", PROMPT], ["--compare", PROMPT]])
def test_the_option_is_refused_where_it_has_no_effect(generate, folders, other):
    code, _, err = generate(*other, *folders.options(), "--show-drafts")
    assert code == 2
    assert "--show-drafts marks texts" in err
