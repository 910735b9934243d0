"""Synthetic acceptance: as many drafts are accepted as asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.cells import cells_config
from bench.oracle import Oracle
from bench.synthetic import Scattered, synthetic_acceptance
from peagle_jax import Engine, SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.engine.device.compilation import pickled, unpickle
from peagle_jax.engine.device.program_descriptions import describe, describe_tree
from peagle_jax.method.drafter import make_drafter
from peagle_jax.method.plan import RequestParams
from tests import tiny


def synthetic_engine(length: float, temperature: float) -> tuple[Engine, list]:
    head = tiny.head()
    drafter = Scattered(make_drafter(head, 3, "argmax"), 128, 3)
    sizes = dict(num_draft=3, max_num_seqs=8, max_model_len=192, prefill_rows=8, prefill_chunk=4)
    config = cells_config((8,), **sizes)
    rule = synthetic_acceptance(length, 3)
    engine = Engine(tiny.target(), head, config, drafter=drafter, accept=rule)
    params = SamplingParams(max_tokens=120, temperature=temperature, ignore_eos=True)
    return engine, engine.generate([[i, i + 1] for i in range(8)], params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_has_the_mean_asked_for(temperature):
    _, completions = synthetic_engine(2.4, temperature)
    rounds = sum(c.rounds for c in completions)
    mean = 1 + sum(c.accepted for c in completions) / rounds
    assert mean == pytest.approx(2.4, abs=0.08)
    counts = np.sum([c.accepted_per_position for c in completions], axis=0) / rounds
    assert counts[0] == 1.0  # 1, a fraction, 0: vLLM's schedule
    assert counts[2] == 0.0
    tokens = [token for c in completions for token in c.tokens]
    assert len(set(tokens)) > 100  # of 128: routing stays diverse


def test_synthetic_acceptance_must_be_possible():
    with pytest.raises(ConfigError, match=r"K=3 .* 1 to 4"):
        synthetic_acceptance(4.5, 3)
    with pytest.raises(ConfigError, match="1 to 8"):
        synthetic_acceptance(0.5, 7)


def accepted_of(rule, seed: int, num_draft: int, count: int) -> list[int]:
    """Drafts that a rule accepts in `count` rounds of a request."""
    row = lambda value, dtype: jnp.full(count, value, dtype)
    params = RequestParams(
        seed=jnp.tile(jnp.array([[0, seed]], jnp.uint32), (count, 1)),
        temperature=row(0, jnp.float32),
        top_k=row(0, jnp.int32),
        top_p=row(1, jnp.float32),
        min_p=row(0, jnp.float32),
        num_draft=row(num_draft, jnp.int32),
        scored=row(0, jnp.int32),
        adjusts=row(0, jnp.int32),
    )
    positions = 10 * jnp.arange(count)[:, None] + jnp.arange(num_draft + 1)
    drafts = jnp.zeros((count, num_draft), jnp.int32)
    verdict = rule(jnp.zeros((count, num_draft + 1, 4)), drafts, None, positions, params)
    return (verdict.count - 1).tolist()


@pytest.mark.parametrize("kind", [Scattered, Oracle])
def test_programs_with_a_drafter_of_the_benches_are_kept_on_disk(kind):
    own = 128 if kind is Scattered else jnp.zeros((2, 8), jnp.int32)
    drafter = kind(make_drafter(tiny.head(), 3, "argmax"), own, 3)
    assert kind.program_key in describe_tree(jax.tree.structure(drafter))


@pytest.mark.parametrize("kind", ["drafter", "length"])
def test_processes_that_compile_get_drafter_and_rule_by_pickle(kind):
    """An object that came by pickle must name the programs that the measuring process looks for."""
    made = {
        "drafter": lambda: Scattered(make_drafter(tiny.head(), 3, "argmax"), 128, 3),
        "length": lambda: synthetic_acceptance(2.5, 3),
    }[kind]()
    sent = unpickle(pickled(made))
    assert sent.program_key == made.program_key
    if kind == "drafter":
        described = [describe_tree(jax.tree.structure(one)) for one in (sent, made)]
        assert described[0] == described[1]
        assert all(map(np.array_equal, jax.tree.leaves(sent), jax.tree.leaves(made)))
    else:
        assert describe(sent) == describe(made)
        for text in range(2):
            assert accepted_of(sent, text, 3, 50) == accepted_of(made, text, 3, 50)
