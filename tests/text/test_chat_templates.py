"""Chat templates as programs of strangers: they run in a process of their own, with limits."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from peagle_jax.cli.model_folders import ASSETS
from peagle_jax.config import ConfigError
from peagle_jax.text import chat_templates
from peagle_jax.text.bounded_process import BoundedProcess, UnavailableError
from peagle_jax.text.tokenizer import Tokenizer
from tests.text.families import write
from tests.waiting import LIMIT, eventually

USER = {"role": "user", "content": "Hi €"}
POWER = "{{ 9 ** (9 ** 9) }}"
HOSTILE = {
    "power": POWER,
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * 9999999999 }}",
    "width": "{{ 'a'.ljust(9999999999) }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "growth": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ "
    "n.s %}{% endfor %}",
    "text": "{{ 'a' * 20000000 }}",
    "recursion": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@contextmanager
def at_most_a_second(monkeypatch):
    """The limit of processor time is as short as it gets; a chat that should pass could have none
    left."""
    with monkeypatch.context() as patch:
        patch.setattr(chat_templates, "SECONDS", 0)
        yield


def tokenizer_with(folder, template: str) -> Tokenizer:
    write("qwen", folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_and_the_next_chat_is_answered(tmp_path, name, monkeypatch):
    hostile = tokenizer_with(tmp_path, HOSTILE[name])
    with (
        at_most_a_second(monkeypatch),
        pytest.raises(ConfigError, match="the chat template failed") as caught,
    ):
        hostile.chat_text([USER])
    assert not isinstance(caught.value, UnavailableError)
    assert tokenizer_with(tmp_path, "{{ messages[0].content }}").chat_text([USER]) == "Hi €"


HOSTILE_PATTERNS = {
    "one search": (r"(a+)+b|a", 4000),
    "many searches": (r"a*a*a*a*b|a", 400),
}


@pytest.mark.parametrize("name", HOSTILE_PATTERNS)
def test_a_hostile_pattern_of_a_tokenizer_is_an_error_and_the_next_text_is_tokenised(
    tmp_path, name, monkeypatch
):
    """The library gives up a search in half a second, by a panic, and repeats others."""
    pattern, size = HOSTILE_PATTERNS[name]
    hostile = tokenizer_cut_by(pattern, tmp_path)
    assert hostile.may_take_forever
    with at_most_a_second(monkeypatch), pytest.raises(ConfigError, match="tokenizer"):
        hostile.encode_in_time("a" * size)
    if name == "one search":
        with pytest.raises(ConfigError, match="cannot encode the text"):
            hostile.encode("a" * size)
    text = "Hi €"
    assert hostile.encode_in_time(text) == hostile.encode(text)
    with pytest.raises(ConfigError, match="not a valid Unicode string"):
        hostile.encode_in_time("\ud800")


@pytest.mark.parametrize("family", ["qwen", "llama", "gemma"])
def test_patterns_of_released_models_need_no_process(tmp_path, family):
    write(family, tmp_path)
    assert not Tokenizer(tmp_path).may_take_forever
    assert not Tokenizer(ASSETS / "target").may_take_forever


def tokenizer_cut_by(pattern: str, folder) -> Tokenizer:
    write("qwen", folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_threads_that_chat_at_once_get_their_own_texts(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "{{ messages[0].content }}{{ mark }}")
    talks = [f"{i} \ud800" * 30_000 * (i % 2) for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        chat = lambda text: tokenizer.chat_text([{"content": text}], mark=[None, 1.5])
        assert list(pool.map(chat, talks)) == [f"{text}[None, 1.5]" for text in talks]


def test_a_limit_of_time_ends_with_its_answer():
    """The next question is read before its own limit starts."""
    child = (
        "import resource; from peagle_jax.text import bounded_process as b\n"
        "limit = lambda seconds: b.limit_time(seconds) if seconds else None\n"
        "soft = lambda: resource.getrlimit(resource.RLIMIT_CPU)[0]\n"
        "b.answer_all(lambda seconds: (limit(seconds), soft())[1])"
    )
    process = BoundedProcess("a test", [sys.executable, "-c", child], seconds=LIMIT)
    before, limited, after = (process.ask(seconds) for seconds in (0, 9, 0))
    process.end()
    assert limited != before
    assert after == before


def test_an_interrupted_chat_is_nobodys_fault(tmp_path):
    hostile = tokenizer_with(tmp_path, POWER)
    hostile.prepare_chat()
    errors = []

    def chat():
        try:
            hostile.chat_text([USER])
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=chat)
    thread.start()
    eventually(chat_templates._renderer._lock.locked, "the chat is rendered")
    chat_templates.interrupt()
    thread.join(LIMIT)
    assert isinstance(errors[0], UnavailableError)
    assert errors[0].is_ended


def test_values_that_are_no_json_are_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "{{ x }}")
    with pytest.raises(ConfigError, match=r"the chat template failed: .*object.*JSON"):
        tokenizer.chat_text([USER], x=object())
