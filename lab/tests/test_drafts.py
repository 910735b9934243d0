"""`python -m lab headroom` and `history`: acceptance lengths without rounds."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.models import Models
from lab.headroom import as_text, drafted, expected
from lab.history import Exchange, Texts, simulated
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


def test_a_copy_continues_the_longest_match_by_the_most_frequent_token():
    texts = Texts()
    texts.add([1, 2, 3, 4, 5, -1, 9, 1, 2, 3, 6, 5, -1, 8, 1, 2, 3, 6, 7, -1, 2, 9, 1, 2, 3])
    assert texts.copied(0, 24, 4) == ([6, 5], 4), "9 1 2 3 stood before 6 5"
    assert texts.copied(0, 16, 1) == ([6], 3), "of equal matches the last"
    assert texts.copied(13, 16, 2) == ([], 0), "nothing in the same text"
    assert texts.correct(16, [6, 7, 5]) == 2


def test_history_repeats_what_the_text_alone_does_not_know():
    rng = np.random.default_rng(1)
    prompt, answer = rng.permutation(50).tolist(), (50 + rng.permutation(41)).tolist()
    none = SimpleNamespace(heads={})
    found = simulated(none, [Exchange("again", prompt, answer)] * 2, (3, 7))
    assert found["text"] == {3: 1.0, 7: 1.0}
    first, second = 40, 10  # rounds; the second answer has three drafts a round
    assert found["history"][3] == pytest.approx(80 / (first + second))
