"""The comparison of messages with the library, on virtual devices of a CPU, which run the definition of messages."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench import peer_messages
from pallas_kernels.peer_gather import api

SMALL = ["--rows", "1", "8", "--columns", "64", "--calls", "1", "--seconds", "0"]


@pytest.mark.slow
def test_messages_are_compared_and_timed(capsys):
    assert peer_messages.main(SMALL) == 0
    said = capsys.readouterr().out
    assert said.count(": equal") == 18
    assert "8 rows, us: messages " in said
    assert ", 0 calls differ" in said


def test_a_wrong_bit_is_found(monkeypatch):
    right = api.gather_sum

    def wrong(parts, dtype, links, **how):
        sums, links = right(parts, dtype, links, **how)
        return sums.at[0, 0].multiply(-1), links

    monkeypatch.setattr(api, "gather_sum", wrong)
    wire = peer_messages.Wire(2)
    name, operation, arrays = next(peer_messages.cases(wire, [2], 64))
    assert name == "1 parts of 2 rows in bfloat16"
    wanted = wire.by_library(operation, arrays)()
    assert peer_messages.differing(wire.by_messages(operation, arrays)(), wanted) == 128


def test_parts_without_weight_are_nan():
    values, weights, rows = peer_messages.random_mixture(np.random.default_rng(1), 2, 8, 4, 16)
    parts = jnp.stack([values[i][rows[i]] for i in (0, 1)])
    np.testing.assert_array_equal(jnp.isnan(parts).all(-1), weights == 0)
    assert 0 < (weights == 0).mean() < 1
