"""What a head starts from."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import ConfigError
from peagle_jax.training import drafter, recipe
from tests import tiny

OWN_TABLES = dataclasses.replace(tiny.HEAD, own_embedding=True, own_lm_head=True)


def test_deep_layers_start_as_the_targets_last_ones():
    target = tiny.target()
    config = dataclasses.replace(OWN_TABLES, num_layers=3, qk_norm=True)
    head = drafter.init_head(config, target, 0)
    for ours, theirs in zip(head.layers, target.layers[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))
    fresh = drafter.init_head(dataclasses.replace(config, qk_norm=False), target, 0)
    theirs = target.layers[-1].mlp.down.weight[...]
    assert (fresh.layers[-1].mlp.down.weight[...] != theirs).any(), "it has no norms to copy"


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(36, (2, 10, 18, 26, 34)), (40, (2, 11, 20, 29, 38)), (3, (2,))]
)
def test_a_block_drafter_taps_what_the_released_ones_tap(num_layers, taps):
    """Those of Qwen3-8B and 14B; a small target has fewer streams."""
    target = dataclasses.replace(tiny.TARGET, num_layers=num_layers)
    assert recipe.spread_taps(target) == taps


@pytest.mark.parametrize("family", ["qwen2", "llama with biases", "mistral"])
def test_a_head_starts_from_layers_without_their_biases(family):
    target = tiny.target(**tiny.TARGETS[family])
    assert drafter.can_copy_layers(OWN_TABLES, target)
    head = drafter.init_head(OWN_TABLES, target, 0)
    for name in ("qkv", "out"):
        ours, theirs = (getattr(m.layers[-1].attention, name) for m in (head, target))
        np.testing.assert_array_equal(ours.weight[...], theirs.weight[...])
        assert ours.bias is None


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen3_moe", dict(qk_norm=True)),
        ("gemma4", dict(qk_norm=True)),
        ("llama", dict(num_layers=5)),
        ("llama", dict(num_layers=1)),
        ("llama", dict(intermediate_size=64)),
    ],
)
def test_layers_of_another_form_are_not_copied(family, changed):
    target = tiny.target(**tiny.TARGETS[family])
    assert not drafter.can_copy_layers(dataclasses.replace(OWN_TABLES, **changed), target)


def test_a_small_vocabulary_has_the_end_tokens_and_the_most_frequent_ones():
    config = dataclasses.replace(OWN_TABLES, draft_vocab_size=4)
    target = dataclasses.replace(tiny.TARGET, eos_ids=(7,))
    tokens = np.array([[9, 9, 9, 30, 30, 2, 2, 5], [9, 2, 30, 2, 1, 1, 1, 1]])
    text = drafter.Text(tokens, np.array([1, 1]), np.array([8, 4]))
    assert drafter._draft_ids(config, target, text).tolist() == [2, 7, 9, 30]


def test_a_head_that_does_not_fit_is_refused():
    with pytest.raises(CheckpointError, match="--method peagle: the head does not fit the target"):
        drafter.init_head(dataclasses.replace(tiny.HEAD, taps=(9, 1, 2)), tiny.target(), 0)
    for wrong in (dict(draft_vocab=500), dict(draft_vocab=9, share=["unembedding"])):
        with pytest.raises(ConfigError, match="--draft-vocab"):
            recipe.head_config(tiny.TARGET, method="peagle", **wrong)
