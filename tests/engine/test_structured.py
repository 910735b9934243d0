"""Structured output through the engine: every text satisfies its constraint under any load."""

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.engine.host.request import Request
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny
from tests.programs import one_bucket
from tests.vocabularies import BEGIN_THINK, END, END_THINK, json_tokenizer

SIZES = dict(
    num_draft=7,
    max_num_seqs=4,
    max_model_len=160,
    page_size=4,
    prefill_chunk=16,
    prefill_rows=2,
    max_waiting=999,
    max_logprobs=3,
)
NUM_PAGES = 45  # little more than one longest request: the younger are preempted
PROMPTS = [
    np.random.default_rng(i).integers(0, 95, n).tolist() for i, n in enumerate((1, 5, 40, 70))
]
SCHEMAS = (
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 4},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-c]{2,9}-[0-9]+$", "maxLength": 14},
    {"anyOf": [{"type": "boolean"}, {"const": {"k": [1, 2]}}]},
    {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "on": {"format": "date", "type": "string"},
        },
        "required": ["name", "on"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "prefixItems": [
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
            {"type": "null"},
        ],
        "items": False,
        "minItems": 2,
    },
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return json_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shared(tokenizer) -> Engine:
    target = tiny.target(**tiny.ONE_LAYER, eos_ids=(tokenizer.added[END],))
    config = EngineConfig(**SIZES, num_pages=NUM_PAGES)
    return one_bucket(
        Engine(target, tiny.head(**tiny.HEAD_OF_ONE_LAYER), config, tokenizer=tokenizer)
    )


@pytest.fixture
def engine(shared) -> Engine:
    """The shared engine, which every test must leave empty."""
    yield shared
    assert not shared.has_work
    shared.scheduler.check_integrity()


def constrained(schema: dict, **fields) -> SamplingParams:
    fields = dict(max_tokens=60) | fields
    return SamplingParams(structured=Structured.json_schema(schema), **fields)


def run(engine: Engine, params: list[SamplingParams], aborted=()) -> list[Request]:
    """Runs one request for each of `params`; those at the places `aborted` end after some steps."""
    requests = [engine.add_request(PROMPTS[i % len(PROMPTS)], one) for i, one in enumerate(params)]
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 9 == 0 and steps // 9 in aborted:
            engine.abort(requests[steps // 9])
    return requests


def check(engine: Engine, request: Request, schema: dict) -> None:
    """The text is valid, or the beginning of a valid one if something else ended it."""
    assert request.finish_reason in ("stop", "length", "abort"), request.error
    matcher = engine.grammars.compile(request.params.structured)
    matcher.consume(request.output)
    text = engine.tokenizer.decode(request.output)
    assert matcher.error is None, text
    if request.finish_reason == "stop":
        assert matcher.is_complete
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_obeys_its_schema_with_any_drafts_preempted_or_aborted(engine, temperature):
    drafts = random.Random(0)
    schemas = [schema for schema in SCHEMAS for _ in range(2)]
    params = [
        constrained(
            schema,
            temperature=temperature,
            seed=i,
            num_speculative_tokens=drafts.choice([0, 3, 7]),
        )
        for i, schema in enumerate(schemas)
    ]
    before = engine.scheduler.num_preemptions
    requests = run(engine, params, aborted=(3, 5))
    for request, schema in zip(requests, schemas, strict=True):
        check(engine, request, schema)
    reasons = [request.finish_reason for request in requests]
    assert reasons.count("stop") >= len(requests) // 2
    assert engine.scheduler.num_preemptions > before


def test_drafts_do_not_change_a_greedy_text(engine):
    plain, *drafted = (
        [constrained(schema, num_speculative_tokens=k, max_tokens=30) for schema in SCHEMAS[:5]]
        for k in (0, 3, 7)
    )
    want = run(engine, plain)
    for params in drafted:
        got = run(engine, params)
        assert [r.output for r in got] == [r.output for r in want]
        assert sum(r.drafted for r in got) > 0 == sum(r.drafted for r in want)


def test_a_free_neighbour_writes_what_it_writes_alone(engine):
    free = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=t, seed=5) for t in (0, 1)]
    alone = [request.output for request in run(engine, free)]
    beside = run(engine, [*free, constrained(SCHEMAS[0]), constrained(SCHEMAS[3], temperature=1)])
    assert [request.output for request in beside[:2]] == alone


def test_the_next_constrained_round_runs_while_the_caller_reads_the_one_before(engine):
    for prompt, schema in zip(PROMPTS, SCHEMAS[:2], strict=False):
        engine.add_request(prompt, constrained(schema, max_tokens=20))
    num_read = 0
    while engine.has_work:
        for request, _ in engine.step():
            num_read += 1
            assert request.is_finished or request.in_flight == 1
    assert num_read > 4


def test_a_complete_text_is_followed_by_its_end_only(engine, tokenizer):
    (request,) = run(engine, [constrained(SCHEMAS[4], ignore_eos=True, max_tokens=40)])
    end = tokenizer.added[END]
    text = request.output[: request.output.index(end)]
    assert request.output == text + [end] * (40 - len(text))
    jsonschema.validate(json.loads(tokenizer.decode(text)), SCHEMAS[4])
    assert request.finish_reason == "length"


def test_the_limit_of_tokens_ends_a_text_within_a_string(engine, tokenizer):
    schema = {"type": "string", "minLength": 50}
    (request,) = run(engine, [constrained(schema, max_tokens=9)])
    assert (request.finish_reason, len(request.output)) == ("length", 9)
    check(engine, request, schema)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("reasoning", ["open", "optional"])
def test_reasoning_ends_anywhere_and_the_answer_obeys(engine, tokenizer, reasoning):
    """The end of the reasoning is made likely, so that it falls at every place of a round."""
    begin, end = tokenizer.added[BEGIN_THINK], tokenizer.added[END_THINK]
    schema = SCHEMAS[1]
    structured = replace(Structured.json_schema(schema), reasoning=reasoning)
    params = [
        SamplingParams(
            structured=structured,
            max_tokens=80,
            temperature=1.0,
            seed=i,
            logit_bias={begin: 9.0, end: 2.5},
        )
        for i in range(8)
    ]
    lengths = set()
    for request in run(engine, params):
        check_prefix = engine.grammars.compile(structured)
        check_prefix.consume(request.output)
        assert check_prefix.error is None
        if request.finish_reason != "stop" or end not in request.output:
            continue
        place = request.output.index(end)
        lengths.add(place)
        answer = tokenizer.decode(request.output[place + 1 :])
        jsonschema.validate(json.loads(answer), schema)
    assert len(lengths) >= 3


def test_logprobs_are_those_of_the_free_model(engine):
    (request,) = run(engine, [constrained(SCHEMAS[0], logprobs=3)])
    unlikely = [one for one in request.logprobs if one.logprob < one.top[-1][1]]
    assert unlikely, "the constraint never chose against the model"
    for one in request.logprobs:
        assert sum(np.exp(value) for _, value in one.top) <= 1.0001


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words", "min_tokens"])
def test_what_could_leave_no_token_is_refused_by_name(engine, field):
    value = {"allowed_token_ids": (5, 6), "bad_words": ("a",), "min_tokens": 3}[field]
    with pytest.raises(ConfigError) as caught:
        engine.add_request([1, 2], constrained(SCHEMAS[0], **{field: value}))
    assert caught.value.field == field
