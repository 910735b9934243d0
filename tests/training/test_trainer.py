"""The update step: what holds for any task."""

import dataclasses
import logging
import struct
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon
from tensorboardX.proto.event_pb2 import Event

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import H200
from peagle_jax.cli import plotting
from peagle_jax.models import layers
from peagle_jax.training.curves import Curves
from peagle_jax.training.trainer import Task, fit, make_optimizer, make_step
from tests.training.small import run_config

RUN = run_config(Path("unused"), 1, optimizer="adamw", learning_rate=1e-3, adam_learning_rate=1e-3)


def test_a_step_is_traced_without_kernels_which_have_no_gradients():
    def loss(params, constants, batch, key):
        out = linear(batch.astype(jnp.bfloat16), params["weight"].astype(jnp.bfloat16))
        return out.astype(jnp.float32).sum(), (jnp.float32(1), {})

    params = {"weight": jnp.ones((64, 128))}
    task = Task(
        params=params, loss=loss, constants=None, batch=None, evaluate=None, tokens_per_step=1
    )
    optimizer = make_optimizer(RUN, params)
    arguments = (params, optimizer.init(params), None, jnp.ones((8, 128)), 0, 1.0)
    with dispatch.assume(H200):
        traced = str(jax.make_jaxpr(make_step(task.loss, RUN, optimizer))(*arguments))
        plain = str(jax.make_jaxpr(loss)(params, None, arguments[3], None))
    assert "block_gemm" in plain
    assert "block_gemm" not in traced


@pytest.mark.slow
def test_equal_matrices_are_updated_together_as_they_would_be_one_by_one():
    names = ("a.weight", "b.weight", "wide.weight", "embed.weight", "norm.weight")
    shapes = ((6, 4), (6, 4), (3, 5), (7, 4), (4,))
    keys = jax.random.split(jax.random.key(0), 10)
    params, grads = (
        {n: jax.random.normal(k, s) for n, k, s in zip(names, some, shapes, strict=True)}
        for some in (keys[:5], keys[5:])
    )
    run = dataclasses.replace(RUN, optimizer="muon", weight_decay=0.1)
    axes = MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    inner = {
        n: axes if n.endswith(("a.weight", "b.weight", "wide.weight")) else None for n in names
    }
    apart = optax.chain(
        optax.clip_by_global_norm(run.clip),
        muon(
            run.learning_rate,
            weight_decay=0.1,
            adam_b1=0.9,
            adam_b2=0.95,
            weight_decay_mask={n: p.ndim == 2 for n, p in params.items()},
            adam_learning_rate=run.adam_learning_rate,
            muon_weight_dimension_numbers=inner,
            consistent_rms=0.2,
        ),
    )
    got, want = (
        rule.update(grads, rule.init(params), params)[0]
        for rule in (make_optimizer(run, params), apart)
    )
    assert got.keys() == want.keys()
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-7, err_msg=name)


def test_gradients_of_narrow_products_are_narrow_products():
    """A float32 cotangent would make them float32 products: twice the time, twice the traffic."""

    def loss(x, weight):
        with dispatch.references():
            return (linear(x, weight, out_dtype=jnp.float32) ** 2).sum()

    x, weight = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((8, 32), jnp.bfloat16)
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all("(tensor<" in line and "f32>, tensor" not in line for line in products)
    gradients = jax.grad(loss, (0, 1))(x, weight)
    wide = jax.grad(loss, (0, 1))(x.astype(jnp.float32), weight.astype(jnp.float32))
    for a, b in zip(gradients, wide, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2e-2)


def test_training_rounds_products_that_serving_keeps_wide():
    """A stored float32 product of bfloat16 inputs takes twice the memory and traffic."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, weight = (jax.random.normal(key, (16, 16), jnp.bfloat16) for key in keys)
    product = lambda: linear(x, weight, out_dtype=jnp.float32)
    wide = product()
    with dispatch.references(rounded=True):
        rounded = product()
    assert (wide != rounded).any()
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), rounded)
    np.testing.assert_array_equal(product(), wide)


@pytest.mark.parametrize("activation", [jax.nn.silu, partial(jax.nn.gelu, approximate=True)])
def test_the_gradient_of_the_gated_product_is_that_of_its_definition(activation):
    keys = jax.random.split(jax.random.key(0), 2)
    gate_up, g = jax.random.normal(keys[0], (3, 10)), jax.random.normal(keys[1], (3, 5))
    plain = lambda x: activation(x[:, :5]) * x[:, 5:]
    out, pull = jax.vjp(partial(layers._gated, activation), gate_up)
    want, pull_plain = jax.vjp(plain, gate_up)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(pull(g)[0], pull_plain(g)[0], rtol=1e-5, atol=1e-6)


def test_without_matplotlib_a_run_goes_on_and_says_what_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plotting, "installed", lambda: False)
    one = jnp.float32(1)
    task = Task(
        params={"weight": jnp.ones((4, 4))},
        loss=lambda params, constants, batch, key: ((params["weight"] ** 2).sum(), (one, {})),
        constants=None,
        batch=lambda step: jnp.ones(4),
        evaluate=lambda params: {"loss": 1.0},
        tokens_per_step=1,
    )
    with caplog.at_level(logging.WARNING):
        fit(task, dataclasses.replace(RUN, out=tmp_path))
    (line,) = [one.getMessage() for one in caplog.records if "curves.png" in one.getMessage()]
    assert "install 'peagle-jax[plots]'" in line
    assert (tmp_path / "train.csv").exists()
    assert not (tmp_path / "curves.png").exists()


def _flat(scores):
    """A task whose evaluations give these acceptance lengths in turn."""
    left = iter(scores)
    return Task(
        params={"weight": jnp.ones(3)},
        loss=lambda params, constants, batch, key: (params["weight"].sum(), (jnp.float32(1), {})),
        constants=None,
        batch=lambda step: np.zeros((1, 1), np.float32),
        evaluate=lambda params: dict(loss=1.0, acceptance_length=next(left)),
        tokens_per_step=1,
    )


def test_a_run_that_is_no_better_cools_down_and_its_curves_are_in_tensorboard(tmp_path, capsys):
    run = dataclasses.replace(
        RUN,
        out=tmp_path,
        steps=100,
        decay=0.5,
        log_every=4,
        eval_every=4,
        save_every=4,
        patience=2,
        log_to=("tensorboard",),
    )
    fit(_flat([1.0, 2.0, 1.5, 2.0, *[3.0] * 9]), run)  # flat at step 16: it ends at step 32
    assert "no better since 2 evaluations: cools down to step 32" in capsys.readouterr().err
    curves = Curves(tmp_path / "eval.csv")
    curves.resume(100)
    steps, lengths = curves.column("acceptance_length")
    assert (steps[-1], lengths) == (32, [1.0, 2.0, 1.5, 2.0, *[3.0] * 4])
    fit(_flat([]), run)  # has ended, also for the same command
    assert _scalars(tmp_path / "tensorboard", "heldout/acceptance_length") == lengths


def _scalars(folder: Path, tag: str) -> list[float]:
    """Values of a curve in files of TensorBoard: length, checksum, event, checksum."""
    found = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            for one in event.summary.value:
                if one.tag == tag:
                    found[event.step] = one.simple_value
            content = content[16 + size :]
    return [found[step] for step in sorted(found)]
