"""Synthetic acceptance: as many drafts are accepted as asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.oracle import Oracle
from bench.synthetic import Scattered, synthetic_acceptance
from peagle_jax.config import ConfigError
from peagle_jax.engine.device.compilation import pickled, unpickle
from peagle_jax.engine.device.program_descriptions import describe, describe_tree
from peagle_jax.method.adjust import Adjustments, init_controls
from peagle_jax.method.drafter import make_drafter
from tests import tiny
from tests.request_params import request_params


def test_synthetic_acceptance_must_be_possible():
    with pytest.raises(ConfigError, match=r"K=3 .* 1 to 4"):
        synthetic_acceptance(4.5, 3)
    with pytest.raises(ConfigError, match="1 to 8"):
        synthetic_acceptance(0.5, 7)


def accepted_of(rule, seed: int, num_draft: int, count: int) -> list[int]:
    """Drafts that a rule accepts in `count` rounds of a request."""
    params = request_params(count, seed=[0, seed], num_draft=num_draft)
    positions = 10 * jnp.arange(count)[:, None] + jnp.arange(num_draft + 1)
    drafts = jnp.zeros((count, num_draft), jnp.int32)
    logits = jnp.zeros((count, num_draft + 1, 4))
    verdict = jax.jit(rule)(logits, drafts, None, positions, params)
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


def test_a_draft_that_a_mask_forbids_is_not_accepted():
    """Row 0 may only have token 2, row 1 has no mask; both drafted token 1."""
    params = request_params(2, num_draft=3)
    mask = jnp.zeros((2, 4, 1), jnp.int32).at[0].set(1 << 2)
    of_rows = jnp.arange(2), jnp.array([1, 0], jnp.int32)
    given = Adjustments(init_controls(2, 4), *of_rows, mask)
    drafts = jnp.ones((2, 3), jnp.int32)
    positions = jnp.arange(4)[None].repeat(2, 0)
    rule = synthetic_acceptance(3.0, 3)
    verdict = jax.jit(rule)(jnp.zeros((2, 4, 4)), drafts, None, positions, params, given)
    assert verdict.count.tolist() == [1, 3]
    assert (verdict.tokens[0, 0], verdict.tokens[1, 0]) == (2, 1)
