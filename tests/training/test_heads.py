"""What a head is trained on: its start, the weights of its depths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.config import ConfigError
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.training import cod, drafter, passes
from peagle_jax.training.trainer import split_model
from tests import tiny


@jax.jit
def _run(target, text):
    return passes.run_target(target, text, tiny.HEAD.taps)


def _options(**fields):
    base = dict(
        continuations=None, batch=2, num_depths=4, rate=0.7, min_rate=0.3, step_decay=1.0,
        dtype="float32", attention="xla", query_chunk=None, loss_chunk=16,
        eval_sequences=2, num_draft=3,
    )  # fmt: skip
    return passes.DrafterOptions(**(base | fields))


def _text(S=12):
    tokens = jax.random.randint(jax.random.key(5), (2, S), 3, tiny.TARGET.vocab_size)
    return passes.Text(tokens, jnp.array([2, 4]), jnp.array([S, S - 2]))


@pytest.fixture(scope="module")
def outcome_of():
    """Outcome of a head on a small text, all elements."""
    target, text = tiny.target(), _text()
    run = _run(target, text)
    elements = cod.all_elements(passes.slot_is_trained(text), 4)

    def outcome(head, **fields):
        options = _options(**fields)

        @jax.jit
        def compare(head):
            rows = passes.parallel_rows(head, target, run, elements, options)
            return passes.compare(head, target, run, options, rows)

        return compare(head)

    return outcome


@pytest.mark.slow
def test_a_widened_head_computes_what_it_computed(outcome_of):
    old = tiny.head(mlp_bias=True)
    for mlp in (old.first.mlp, old.layers[0].mlp):
        mlp.gate_up.bias.set_value(jnp.linspace(-1, 1, 96))
    wide = dataclasses.replace(tiny.HEAD, mlp_bias=True, intermediate_size=80)
    fresh, merge = split_model(DraftHead(wide, dtype=jnp.float32, rngs=nnx.Rngs(7)))
    params = drafter.warm_start(fresh, split_model(old)[0])
    for name in ("first.mlp.gate_up.weight", "layers.0.mlp.gate_up.weight"):
        gate, up = jnp.split(params[name], 2)
        assert gate.shape == up.shape == (80, 32)
        assert float(jnp.abs(gate[48:]).min()) > 0, "a dead unit would never learn"
    got, want = outcome_of(merge(params)), outcome_of(old)
    np.testing.assert_allclose(got.kl, want.kl, rtol=1e-4, atol=1e-5)


def test_a_head_of_another_shape_is_no_start():
    fresh = split_model(tiny.head())[0]
    with pytest.raises(ConfigError, match=r"layers\.1"):
        drafter.warm_start(fresh, split_model(tiny.head(num_layers=3))[0])
    with pytest.raises(ConfigError, match=r"mlp\.down"):
        drafter.warm_start(fresh, split_model(tiny.head(intermediate_size=56))[0])


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_depths_weigh_powers_of_the_depth_weight(outcome_of, weight):
    head = tiny.head()
    got = outcome_of(head, step_decay=weight)
    kl, used = (np.asarray(x).reshape(2, 4, 12) for x in (got.kl, got.used))
    by_depth = (kl * used).sum((0, 2))
    np.testing.assert_allclose(got.total, (by_depth * weight ** np.arange(4)).sum(), rtol=1e-5)


def test_deep_layers_can_start_as_the_targets_last_ones():
    target = tiny.target()
    config = dataclasses.replace(
        tiny.HEAD, num_layers=3, qk_norm=True, own_embedding=True, own_lm_head=True
    )
    head = drafter.init_head(config, target, 0, from_layers=True)
    for ours, theirs in zip(head.layers, target.layers[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))
    fresh = drafter.init_head(config, target, 0)
    assert (head.first.mlp.down.weight[...] == fresh.first.mlp.down.weight[...]).all()


@pytest.mark.parametrize("family", ["qwen2", "llama with biases", "mistral"])
def test_a_head_starts_from_layers_without_their_biases(family):
    target = tiny.target(**tiny.TARGETS[family])
    config = dataclasses.replace(tiny.HEAD, own_embedding=True, own_lm_head=True)
    assert drafter.can_copy_layers(config, target)
    head = drafter.init_head(config, target, 0, from_layers=True)
    for name in ("qkv", "out"):
        ours, theirs = (getattr(m.layers[-1].attention, name) for m in (head, target))
        np.testing.assert_array_equal(ours.weight[...], theirs.weight[...])
        assert ours.bias is None


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("qwen3_moe", dict(qk_norm=True), "not built as"),
        ("gemma4", dict(qk_norm=True), "not built as"),
        ("llama", dict(num_layers=5), "4 layers after the head's first, 3 of the target"),
        ("llama", dict(num_layers=1), "0 layers after"),
        ("llama", dict(intermediate_size=64), "not built as"),
    ],
)
def test_a_head_starts_from_layers_of_its_own_form_alone(family, changed, says):
    target = tiny.target(**tiny.TARGETS[family])
    config = dataclasses.replace(tiny.HEAD, own_embedding=True, own_lm_head=True, **changed)
    with pytest.raises(ConfigError, match=says):
        drafter.init_head(config, target, 0, from_layers=True)
    assert not drafter.can_copy_layers(config, target)
