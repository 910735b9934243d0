"""A text in pieces: the same loss and gradients, whole chains, less memory."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.method.draft_head import DraftHead
from peagle_jax.training import cod, drafter
from peagle_jax.training.partition import deal, sum_over
from peagle_jax.training.trainer import split_model
from tests import tiny
from tests.training.test_heads import _options, _text


@jax.jit
def _sample(valid):
    return cod.sample_elements(jax.random.key(2), valid, num_depths=5, rate=0.7, min_rate=0.4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_every_element_is_dealt_once_and_chains_stay_whole(pieces):
    valid = jax.random.bernoulli(jax.random.key(0), 0.8, (3, 20)).at[-1].set(False)
    elements = _sample(valid)
    dealt = deal(elements, pieces)
    S = elements.num_slots
    depth = dealt.depth
    for row in range(len(valid)):
        want = zip(
            elements.anchor[row, S:], elements.depth[S:], elements.used[row, S:], strict=True
        )
        want = sorted((int(a), int(d)) for a, d, used in want if used)
        seen = []
        for anchor, used in zip(dealt.anchor[:, row], dealt.used[:, row], strict=True):
            assert not used[:S].any()
            mine = [(int(anchor[r]), int(depth[r])) for r in np.flatnonzero(used)]
            assert all((a, d - 1) in mine for a, d in mine if d > 1), (
                "the parent is in another piece"
            )
            # The attention takes the entry of a block above for the parent.
            for d in range(1, len(dealt.sizes)):
                at, above = dealt.offsets[d + 1], dealt.offsets[d]
                entries = np.flatnonzero(used[at : at + dealt.sizes[d]])
                np.testing.assert_array_equal(anchor[at + entries], anchor[above + entries])
            seen += mine
        assert sorted(seen) == want


@cache
def _loss_and_gradients(segments: int, fields=()):
    target, text = tiny.target(), _text(24)
    params, merge = split_model(tiny.head(sliding_windows=(None, 9)))
    options = _options(segments=segments, **dict(fields))
    loss = partial(drafter.head_loss, merge, tiny.HEAD.taps, options)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return jax.device_get(step(params, target, text, jax.random.key(3)))


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("fields", [(), (("step_decay", 1.3), ("loss", "lk"), ("query_chunk", 5))])
def test_pieces_give_the_loss_and_the_gradients_of_the_whole(segments, fields):
    (loss, (count, metrics)), grads = _loss_and_gradients(segments, fields)
    (want, (want_count, want_metrics)), want_grads = _loss_and_gradients(1, fields)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(count, want_count)
    close(loss, want)
    jax.tree.map(close, metrics, want_metrics)
    for name, gradient in grads.items():
        assert np.abs(want_grads[name]).max() > 0, f"{name} is not trained"
        close(gradient / count, want_grads[name] / count, err_msg=name)


def test_a_sum_over_pieces_is_the_plain_sum():
    """Also without a gradient, and with one scaled from outside."""
    f = lambda shared, constants, piece: ((shared["a"] * piece + constants).sum() ** 2, piece + 1)
    shared, pieces = {"a": jnp.arange(3.0)}, jnp.arange(12.0).reshape(4, 3)
    plain = lambda shared: sum(f(shared, 2.0, piece)[0] for piece in pieces)
    ours = lambda shared: sum_over(f, shared, 2.0, pieces)[0]
    np.testing.assert_allclose(ours(shared), plain(shared))
    np.testing.assert_array_equal(sum_over(f, shared, 2.0, pieces)[1], pieces + 1)
    got, want = (jax.grad(lambda s, g=g: -3.0 * g(s))(shared) for g in (ours, plain))
    np.testing.assert_allclose(got["a"], want["a"])


@pytest.mark.slow
def test_pieces_take_no_more_memory_than_their_context():
    """Temporary bytes of the compiled step for one text of 1024 tokens, K_train 8."""
    S = 1024
    head = nnx.eval_shape(lambda: DraftHead(tiny.HEAD, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    params, merge = split_model(head)
    shape = jax.ShapeDtypeStruct
    text = drafter.Text(shape((1, S), jnp.int32), *[shape((1,), jnp.int32)] * 2)

    def temporary_bytes(**fields):
        options = _options(rate=0.8, loss_chunk=256, **fields)
        loss = partial(drafter.head_loss, merge, tiny.HEAD.taps, options)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        compiled = step.lower(params, tiny.target(), text, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    context = temporary_bytes(num_depths=1)
    whole, four, eight = (temporary_bytes(num_depths=8, segments=n) for n in (1, 4, 8))
    assert whole > 3 * context
    assert four < 0.5 * whole
    assert eight < 1.05 * context
