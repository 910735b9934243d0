"""The update step: what holds for any task."""

from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import H200
from peagle_jax.training.trainer import RunConfig, Task, make_optimizer, make_step

RUN = RunConfig(
    out=Path("unused"), steps=1, minutes=None, optimizer="adamw", learning_rate=1e-3,
    adam_learning_rate=1e-3, weight_decay=0.0, warmup=1, decay=0.1, clip=1.0, microbatches=1, seed=0,
    log_every=1, eval_every=1, save_every=1,
)  # fmt: skip


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
        traced = str(jax.make_jaxpr(make_step(task, RUN, optimizer))(*arguments))
        plain = str(jax.make_jaxpr(loss)(params, None, arguments[3], None))
    assert "block_gemm" in plain
    assert "block_gemm" not in traced
