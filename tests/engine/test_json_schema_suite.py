"""The JSON Schema Test Suite: enforced or refused by name; no invalid instance is admitted."""

import json
import random

import jsonschema
import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.structured import Structured
from tests.json_schema_suite import CHECKABLE, ENFORCED, REFUSED
from tests.serving.scripted import END

NO_SPACE_OF_ECMASCRIPT = "\ufeff"
"""A space for ECMAScript's regular expressions, and none for Rust's."""
NUM_TOKENS = 60


def test_two_hundred_schemas_are_enforced_and_the_others_refused_by_name(grammars):
    assert (len(ENFORCED), len(REFUSED)) == (213, 232)
    for one in ENFORCED:
        grammars.compile(Structured.json_schema(one.schema))
    for one in REFUSED:
        with pytest.raises(ConfigError) as caught:
            grammars.compile(Structured.json_schema(one.schema))
        assert caught.value.field == "structured", one


def test_no_invalid_instance_is_admitted(grammars, tokenizer):
    tried = 0
    for one in ENFORCED:
        for instance in one.invalid:
            matcher = grammars.compile(Structured.json_schema(one.schema))
            text = json.dumps(instance, ensure_ascii=False)
            matcher.consume(tokenizer.encode(text, special=False))
            is_admitted = matcher.error is None and matcher.is_complete
            assert is_admitted == (instance == NO_SPACE_OF_ECMASCRIPT), (one, text)
            tried += 1
    assert tried == 286


def test_random_texts_within_the_masks_satisfy_their_schemas(grammars, tokenizer):
    """The masks alone decide: a random walk that prefers the end of a text and closing brackets."""
    preferred = [*tokenizer.encode('"}]'), tokenizer.special_id(END)]
    complete = 0
    for seed, one in enumerate(CHECKABLE):
        rng, tokens = random.Random(seed), []
        matcher = grammars.compile(Structured.json_schema(one.schema))
        while not matcher.is_complete and len(tokens) < NUM_TOKENS:
            bits = np.frombuffer(matcher.matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            closing = [token for token in preferred if token in allowed]
            tokens.append(rng.choice(closing if closing and rng.random() < 0.7 else allowed))
            matcher.consume(tokens[-1:])
            assert matcher.error is None
        if matcher.is_complete:
            complete += 1
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), one.schema)
    assert complete > 150
