"""Sampling controls in the engine: with drafts the text is the one without, whatever else happens."""

import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from tests import tiny
from tests.programs import one_bucket

J, EOS, STOP = 3, 5, 17
CONFIG = EngineConfig(
    num_draft=J, max_num_seqs=4, max_model_len=96, page_size=8, prefill_chunk=16, prefill_rows=2
)
PROMPTS = [[7, 9, 11, 60], [3, 4, 7], [80, 81, 82, 83, 84], [21]]
CONTROLS = {
    "bias": dict(logit_bias={3: 4.0, 9: -100.0, 40: 6.0, 41: 6.0}),
    "allowed": dict(allowed_token_ids=tuple(range(30, 60)), logit_bias={31: 2.0}),
    "min_tokens": dict(logit_bias={EOS: 60.0, STOP: 60.0}, stop_ids=(STOP,), min_tokens=12),
    "repetition": dict(repetition_penalty=1.8),
    "frequency": dict(frequency_penalty=1.5),
    "presence": dict(presence_penalty=-2.0),
    "together": dict(
        logit_bias={EOS: 3.0, 9: -4.0, 40: 2.0},
        allowed_token_ids=(EOS, 9, *range(30, 100)),
        min_tokens=10,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    ),
}


def params(name: str | None, **more) -> SamplingParams:
    return SamplingParams(max_tokens=32, **(CONTROLS[name] if name else {}), **more)


@pytest.fixture(scope="module")
def target():
    return tiny.target(eos_ids=(EOS,))


@pytest.fixture(scope="module")
def plain(target) -> Engine:
    return one_bucket(Engine(target, None, CONFIG))


@pytest.fixture(scope="module")
def texts(plain) -> dict[str | None, list[list[int]]]:
    """Greedy texts of plain decoding by controls."""
    return {
        name: [c.tokens for c in plain.generate(PROMPTS, params(name))]
        for name in (None, *CONTROLS)
    }
