"""`python -m lab headroom`: acceptance lengths without rounds."""

import numpy as np
import pytest

from bench.models import Models
from lab.headroom import as_text, drafted, expected
from peagle_jax.config import EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.training.acceptance import lengths
from tests import tiny
from tests.programs import one_bucket

PROMPTS = [[1, 2, 0, 3], [3, 0, 2], [0, 0, 1, 2, 3]]
K = 3


@pytest.fixture(scope="module")
def models() -> Models:
    """Of four tokens, so that a random head is often right."""
    small = dict(vocab_size=4)
    head = tiny.head("lattice", seed=4, draft_vocab_size=4, **small)
    target = tiny.target(seed=3, **small)
    return Models(
        name="tiny", dtype="float32", weights="float32", target=target, heads={"peagle": head}
    )


def test_greedy_rounds_are_those_of_the_engine(models):
    config = EngineConfig(
        num_draft=K, max_num_seqs=4, max_model_len=96, page_size=4, max_logprobs=0
    )
    engine = one_bucket(Engine(models.target, models.heads["peagle"], config))
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=40))
    texts = as_text(PROMPTS, [one.tokens for one in done])
    found = drafted(models, texts, K)
    simulated_lengths = {law: lengths(found[law], texts, K)["acceptance_length"] for law in found}
    rounds = sum(one.rounds for one in done)
    assert simulated_lengths["selector"] == pytest.approx(3 * 39 / rounds)
    assert 1.1 < simulated_lengths["selector"] < simulated_lengths["best of 8"]
    assert simulated_lengths["best of 8"] == pytest.approx(K + 1, rel=0.05), "all tokens"


def test_the_expected_length_is_the_sum_of_the_chances(models):
    accepted, kept = np.array([[[0.5], [0.4], [0.3]]]), np.array([[[1.0], [0.5], [0.2]]])
    used = np.ones_like(kept, bool)
    of = lambda num_draft: expected((accepted, kept, used), None, num_draft)["acceptance_length"]
    assert of(1) == pytest.approx(1.5)
    assert of(3) == pytest.approx(1 + 0.5 + 0.4 + 0.5 * 0.3)
    answers = np.random.default_rng(0).integers(0, 4, (3, 12)).tolist()
    laws = drafted(models, as_text(PROMPTS, answers), K, temperature=1.0)
    chances = {law: expected(values, None, K)["acceptance_length"] for law, values in laws.items()}
    assert chances["best of 8"] == pytest.approx(K + 1), "all tokens"
    assert 1 < chances["selector, drawn"] < K + 1
