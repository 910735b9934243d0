"""Weights move once into the layouts of the first round, and all programs take them in these."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout

from peagle_jax import EngineConfig, SamplingParams
from peagle_jax.engine.device import layouts
from peagle_jax.engine.host.calls import RoundShape
from tests.programs import small_engine


def by_columns(x: jax.Array) -> jax.Array:
    """A matrix in the other layout; other arrays as they are."""
    return jax.device_put(x, Format(Layout((1, 0)), x.sharding)) if x.ndim == 2 else x


@partial(jax.jit, static_argnames="num_draft")
def round_of(weights, state, plan, mask, bits, *, num_draft, repeat):
    return state + sum(w.sum() for w in weights) * num_draft, bits


def test_only_weights_that_lie_otherwise_move():
    weights = [jnp.ones((4, 8)), jnp.arange(6.0).reshape(2, 3), jnp.ones(5)]
    others = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 4
    moved = [by_columns(weights[0]), *weights[1:]]
    for given in (weights, moved):
        layouts.move(found := list(given), round_of, RoundShape(2, 3), others)
        for x, right, before in zip(found, weights, given, strict=True):
            assert (x == right).all()
            assert (x is before) == (x.format == before.format)


def test_programs_of_other_platforms_take_weights_wherever_they_lie():
    weights = [jnp.ones((4, 8))]
    assert layouts.shapes(weights) is weights


@pytest.fixture
def on_a_tpu(monkeypatch):
    """This CPU chooses layouts; the choice is the other layout of each matrix."""
    monkeypatch.setattr(layouts, "PLATFORMS", ("cpu",))
    move, calls = layouts.move, []

    def move_by_columns(weights, round_of, shape, others):
        calls.append(shape)
        move(weights, round_of, shape, others)
        weights[:] = map(by_columns, weights)

    monkeypatch.setattr(layouts, "move", move_by_columns)
    return calls


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("warms_up", [True, False])
def test_an_engine_whose_weights_moved_writes_the_same_text(warms_up, request):
    """Also if no warm-up comes before the first prefill."""

    def text() -> list:
        config = EngineConfig(
            num_draft=2,
            max_num_seqs=2,
            max_model_len=64,
            page_size=8,
            prefill_chunk=16,
            batch_sizes=(2,),
            dtype="float32",
        )
        engine = small_engine(config)
        if warms_up:
            reported = []
            engine.warm_up(lambda: reported.append(1))
            assert len(reported) == engine.num_programs
        found = engine.generate([[3, 1, 4, 1, 5], [9, 2]], SamplingParams(max_tokens=10))
        matrices = [x for x in engine.programs._weights if x.ndim == 2]
        return [one.tokens for one in found], {x.format.layout.major_to_minor for x in matrices}

    right, kept = text()
    calls = request.getfixturevalue("on_a_tpu")
    found, moved = text()
    assert found == right
    assert (kept, moved) == ({(0, 1)}, {(1, 0)})
    assert calls == [RoundShape(2, 2)]
