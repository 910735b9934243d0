"""`peagle-train drafter --hidden`: the states of the mask rows, in the forms that the paper compares."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.config import ConfigError
from peagle_jax.training import drafter, passes
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.mask_hidden import VariedHead, mask_states
from peagle_jax.training.picked import pick
from peagle_jax.training.texts import Blocks
from peagle_jax.training.trainer import RunConfig, make_optimizer, split_model
from tests import tiny
from tests.training.test_heads import _options
from tests.training.test_picked import S, _text

BLOCKS = Blocks((3, 2, 2, 1))
FORMS = ("depth", "token", "both", "mix")


@functools.cache
def _drawn(form: str):
    config = dataclasses.replace(tiny.HEAD, **tiny.HEAD_OF_ONE_LAYER, trained_num_draft=4)
    return split_model(VariedHead(config, form, dtype="float32", rngs=nnx.Rngs(0)))


def varied(form: str, **values):
    """A head of one layer and one tap: the random one of other tests, with these values of its own."""
    params, merge = _drawn(form)
    other = split_model(tiny.head(**tiny.HEAD_OF_ONE_LAYER))[0]
    head = merge(params | other | values)
    head.embed = TrainedEmbed(head.embed)
    return head


def _depths():
    return jax.random.normal(jax.random.key(8), (3, 1, 32))


def _of(form: str, anchors, m, e, alpha: float):
    """States of all rows by the definition, [R - B, P, D]; anchors: fuse(g_a), [B, P, D]."""
    rows = []
    for d, size in enumerate(BLOCKS.sizes[1:], start=1):
        for text in range(size):
            row = np.broadcast_to(m, anchors[text].shape)
            if form in ("depth", "both"):
                row = row + e[d - 1]
            if form in ("token", "both"):
                row = row + anchors[text]
            rows.append(row + alpha * anchors[text] if form == "mix" else row)
    return np.stack(rows)


@pytest.mark.sampled(4, slow=2)
@pytest.mark.parametrize("form", ["shared", *FORMS])
@pytest.mark.parametrize("some", [False, True], ids=["all anchors", "picked anchors"])
def test_states_are_those_of_the_form(form, some):
    own = dict(mask_depths=_depths()) if form in ("depth", "both") else {}
    own |= dict(mask_alpha=jnp.float32(0.3)) if form == "mix" else {}
    shared = form == "shared"
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER) if shared else varied(form, **own)
    fused = jax.random.normal(jax.random.key(7), (3, S, 32))
    picked = pick(jax.random.key(0), jnp.ones((3, S), bool), 1.0, 5) if some else None
    anchors = fused
    if some:
        anchors = jnp.take_along_axis(fused, picked.slots[..., None], axis=1)
    got = mask_states(head, fused, BLOCKS, picked)
    m = np.asarray(head.fuse(head.mask_hidden[...]))
    want = _of(form, np.asarray(anchors), m, np.asarray(_depths())[:, 0], 0.3)
    np.testing.assert_allclose(jnp.broadcast_to(got, want.shape), want, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("form", ["both", "mix"])
def test_a_chain_reads_them_as_rows_of_a_round_would(form):
    """One anchor: the context, and its mask rows with their states, through causal attention."""
    own = dict(mask_depths=_depths()) if form == "both" else dict(mask_alpha=jnp.float32(0.3))
    head, target, text = varied(form, **own), tiny.target(**tiny.ONE_LAYER), _text()
    b, a, depths = 1, 5, 3

    @jax.jit
    def both():
        run = passes.run_target(target, text, (0,))
        options = _options(elements="texts", num_depths=depths)
        blocks, valid = Blocks((3,) * depths), passes.slot_is_trained(text)
        rows = passes.text_rows(head, target, run, valid, blocks, options)
        fused = head.fuse(run.taps[b, : a + 1])
        m = head.fuse(head.mask_hidden[...])
        e = [_depths()[d, 0] + fused[a] if form == "both" else 0.3 * fused[a] for d in (0, 1)]
        hidden = jnp.concatenate([fused, m + jnp.stack(e)])[None]
        tokens = jnp.append(text.tokens[b, 1 : a + 2], jnp.array([1, 1]))[None]
        positions = jnp.arange(a + depths)[None]
        out, _ = head(target, tokens, hidden, positions, [None], tiny.causal_attention)
        return rows.out.reshape(depths, 3, S, -1)[:, b, a], out[0, a:]

    np.testing.assert_allclose(*both(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def gradients():
    """Loss and gradients of a head on a small text, with picked anchors and D-PACE."""
    target, text = tiny.target(**tiny.ONE_LAYER), _text()
    valid = passes.slot_is_trained(text)
    picked = pick(jax.random.key(2), valid, 1.0, 5)

    def of(head):
        params, merge = split_model(head)

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            model, run = merge(params), passes.run_target(target, text, (0,))
            options = _options(elements="texts", weights="dpace")
            rows = passes.text_rows(model, target, run, valid, BLOCKS, options, picked)
            return passes.compare(model, target, run, options, rows).total

        return loss(params)

    return of


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("form", ["depth", "mix"])
def test_without_what_it_adds_a_form_is_the_shared_one_bit_for_bit(gradients, form):
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER)
    head.embed = TrainedEmbed(head.embed)
    want, shared = gradients(head)
    none = {} if form == "depth" else dict(mask_alpha=jnp.float32(0))
    got, found = gradients(varied(form, **none))
    assert got == want
    for name in shared:
        np.testing.assert_array_equal(found[name], shared[name], err_msg=name)
    (new,) = found.keys() - shared.keys()
    assert np.abs(np.asarray(found[new])).reshape(-1, 32 if form == "depth" else 1).max(1).all()


def test_a_depth_without_a_vector_is_refused():
    fused = jnp.ones((2, S, 32))
    with pytest.raises(ValueError, match="depth 4, and vectors for 3"):
        mask_states(varied("depth"), fused, Blocks((2,) * 5), None)


def test_vectors_are_no_matrices_for_the_optimiser():
    params = _drawn("both")[0]
    run = RunConfig(
        out=None, steps=1, minutes=None, optimizer="muon", learning_rate=1.0,
        adam_learning_rate=0.5, weight_decay=0.5, warmup=1, decay=0.1, clip=1e9, microbatches=1, seed=0,
        log_every=1, eval_every=1, save_every=1,
    )  # fmt: skip
    some = {name: jnp.ones_like(params[name]) for name in ("mask_depths", "mask_hidden")}
    optimizer = make_optimizer(run, some)
    updates, _ = optimizer.update(some, optimizer.init(some), some)
    as_a_vector = np.full(updates["mask_depths"].shape, updates["mask_hidden"][0])
    np.testing.assert_array_equal(updates["mask_depths"], as_a_vector)


def test_only_elements_by_texts_have_other_forms():
    for form in FORMS:
        with pytest.raises(ConfigError, match=f"--hidden {form} needs --elements texts"):
            _options(hidden=form)


@pytest.fixture
def folder(tmp_path):
    fields = dict(prompt=np.full(8, 4, np.int32), length=np.full(8, 12, np.int32))
    for name in ("train", "heldout"):
        np.savez(tmp_path / f"{name}.npz", tokens=np.full((8, 12), 9, np.uint16), **fields)
    return tmp_path


def test_a_shared_table_is_no_parameter(folder):
    target = tiny.target(**tiny.ONE_LAYER)
    run = dataclasses.make_dataclass("Run", ["seed", "microbatches"])(0, 1)
    names = {}
    for own in (False, True):
        config = dataclasses.replace(
            tiny.HEAD, **tiny.HEAD_OF_ONE_LAYER, own_embedding=own, own_lm_head=own
        )
        task, merge = drafter.make_task(config, target, _options(continuations=folder), run)
        names[own] = task.params.keys()
        head = merge(task.params)
        expected = head.lm_head if own else target.lm_head
        np.testing.assert_array_equal(head.unembedding(target), expected.weight[...])
    assert names[True] - names[False] == {"embed.weight", "lm_head.weight"}
