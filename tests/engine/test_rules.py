"""The list of rules for requests: each error has a message and a field."""

import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.cli.loading import load

J = 3
X = 95  # token "x" of the embedded model


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The embedded model, which has a tokenizer; nothing compiles."""
    return load(config=EngineConfig(num_draft=J, max_model_len=64, max_logprobs=3, num_pages=20))


REFUSED = [
    ([], {}, "prompt", "is empty"),
    ([5] * 64, {}, "prompt", "64 tokens leave no room for output"),
    ([5, 2**20], {}, "prompt", "token ids must lie between 0 and"),
    ([-1, 5], {}, "prompt", "token ids must lie between 0 and"),
    (
        [5],
        dict(num_speculative_tokens=J + 1),
        "num_speculative_tokens",
        "4 is more than the 3 that the engine was compiled for",
    ),
    ([5], dict(logprobs=4), "logprobs", "4 is more than the 3 that the engine was compiled for"),
    ([5], dict(logit_bias={2**20: 1}), "logit_bias", "token ids must lie between 0 and"),
    ([5], dict(allowed_token_ids=(5, -1)), "allowed_token_ids", "token ids must lie between 0 and"),
    ([5], dict(stop_ids=(5, 2**31), min_tokens=2), "stop_ids", "token ids must lie between 0 and"),
    ([5], dict(stop_ids=(-1,)), "stop_ids", "token ids must lie between 0 and"),
    (
        [5],
        dict(bad_words=("zqxj antidisestablishment",)),
        "bad_words",
        "'zqxj antidisestablishment' is [0-9]+ tokens",
    ),
    (
        [5],
        dict(bad_words=("x",), allowed_token_ids=(X,)),
        "bad_words",
        "forbid every token that is allowed",
    ),
    (
        [5],
        dict(allowed_token_ids=(7, 8), stop_ids=(8, 7), min_tokens=1),
        "min_tokens",
        "every token that is allowed ends the text",
    ),
    (
        [5],
        dict(stop_ids=tuple(range(289)), min_tokens=1),
        "min_tokens",
        "works with at most 288 tokens that end the text, and there are",
    ),
    (
        [5],
        dict(bad_words=("x",), logit_bias=dict.fromkeys(range(200, 1224), 1.0)),
        "bad_words",
        "they concern 1025 tokens; at most 1024 may be",
    ),
]


@pytest.mark.parametrize(("prompt", "fields", "field", "rule"), REFUSED)
def test_requests_that_can_never_run_are_refused_with_a_reason(engine, prompt, fields, field, rule):
    for ask in (engine.validate, engine.add_request):
        with pytest.raises(ConfigError, match=rule) as caught:
            ask(prompt, SamplingParams(**fields))
        assert caught.value.field == field
        assert str(caught.value) == f"{field}: {caught.value.rule}"
    assert not engine.has_work


@pytest.mark.parametrize(
    "fields",
    [
        dict(max_tokens="5"),
        dict(max_tokens=5.0),
        dict(temperature=None),
        dict(temperature=np.array([1.0])),
        dict(seed=1.5),
        dict(logprobs=True),
        dict(stop=None),
        dict(stop=[1]),
        dict(stop_ids=5),
        dict(logit_bias=[5, 6]),
        dict(logit_bias={"a": 1.0}),
        dict(allowed_token_ids=["a"]),
        dict(structured={"json": {}}),
    ],
)
def test_values_of_another_type_are_refused_by_name(fields):
    (field,) = fields
    with pytest.raises(ConfigError) as error:
        SamplingParams(**fields)
    assert error.value.field == field


def test_numbers_of_numpy_are_numbers():
    SamplingParams(max_tokens=np.int32(3), temperature=np.float32(0.5), seed=np.int64(1))


@pytest.mark.parametrize(
    "prompt", [None, 5, [None], ["a"], [1.0, 2.5], b"abc", {"prompt": "a"}, "x " * 10_000]
)
def test_what_is_no_prompt_is_refused_before_it_is_tokenised(engine, monkeypatch, prompt):
    monkeypatch.setattr(type(engine.tokenizer), "encode", None)
    with pytest.raises(ConfigError) as error:
        engine.validate(prompt, SamplingParams())
    assert error.value.field == "prompt"


@pytest.mark.parametrize("prompts", ["def f(x):", b"def", {"prompt": "def"}])
def test_one_prompt_is_no_list_of_prompts(engine, prompts):
    with pytest.raises(ConfigError, match=r"must be a list, for one text \[text\]"):
        engine.generate(prompts, SamplingParams())


@pytest.mark.parametrize("params", [[], {"max_tokens": 3}, [SamplingParams()] * 2, [None]])
def test_parameters_belong_to_prompts(engine, params):
    with pytest.raises(ConfigError, match="params"):
        engine.generate(["def f(x):"], params)


def test_bad_words_are_not_read_by_patterns_of_unknown_authors(engine, monkeypatch):
    """The event loop and the rounds would wait for them, word by word."""
    monkeypatch.setattr(engine.tokenizer, "may_take_forever", True)
    asked = []
    for name in ("encode", "encode_in_time"):
        monkeypatch.setattr(engine.tokenizer, name, lambda text, **options: asked.append(text))
    for ask in (engine.validate, engine.add_request):
        with pytest.raises(ConfigError, match="bad_words: need a tokenizer with the patterns"):
            ask([5], SamplingParams(bad_words=("x",)))
    assert not asked


def test_what_can_run_is_validated_without_a_trace(engine):
    params = SamplingParams(max_tokens=4, stop=("x",), logprobs=3, num_speculative_tokens=J)
    assert engine.validate("a-prompt", params) == engine.tokenizer.encode("a-prompt")
    assert engine.validate(np.array([5, 6]), params) == [5, 6]
    before = engine.add_request([5], params)
    engine.validate([5], params)
    after = engine.add_request([5], params)
    assert after.id == before.id + 1
    for request in (before, after):
        engine.abort(request)
