"""Splits the elements of one long sequence and accumulates gradients inside the step (`--segments`).

Draft elements attend to the depth-0 context and to their own chain, never to another chain. So chains can
be processed piece by piece; only gradients are kept, those of the weights and those of the context's keys
and values, which are computed once. The paper cuts the sequence at positions, which gives pieces of
different sizes. Here anchors are assigned round-robin, so that all pieces have one shape for one scan.
"""

from functools import partial

import jax
import jax.numpy as jnp

from peagle_jax.training.cod import Elements


def deal(elements: Elements, pieces: int) -> Elements:
    """Elements with a leading axis [pieces]: entry e of every block goes to piece e % pieces.

    Blocks stay prefixes of each other: with 2 pieces, blocks of 5 and 3 entries become blocks of 3 and 2,
    piece 0 holding entries (0, 2, 4) and (0, 2), piece 1 entries (1, 3, pad) and (1, pad). The context rows
    are part of every piece, with `used` False: their loss is computed once, outside.
    """
    S, B = elements.num_slots, elements.anchor.shape[0]
    sizes = tuple(-(-size // pieces) for size in elements.sizes)

    def split(x: jax.Array) -> jax.Array:  # [B, T] -> [pieces, B, S + sum(sizes)]
        context, *blocks = jnp.split(x, elements.offsets[1:-1], axis=1)
        parts = [jnp.broadcast_to(context, (pieces, B, S))]
        for block, size in zip(blocks, sizes, strict=True):
            block = jnp.pad(block, ((0, 0), (0, size * pieces - block.shape[1])))
            parts.append(jnp.moveaxis(block.reshape(B, size, pieces), 2, 0))
        return jnp.concatenate(parts, axis=2)

    used = split(elements.used).at[..., :S].set(False)
    return Elements(split(elements.anchor), used, S, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_over(f, shared, constants, pieces):
    """Adds up `value, report = f(shared, constants, piece)` over the leading axis of `pieces`.

    Under differentiation, the forward pass also computes the gradient with respect to `shared`, piece by
    piece. So only one piece's intermediates exist at a time, and nothing is recomputed.

    Returns:
      (sum of values, reports stacked).
    """
    step = lambda total, piece: _add(total, f(shared, constants, piece))
    return jax.lax.scan(step, jnp.zeros(()), pieces)


def _add(total, outcome):
    value, report = outcome
    return total + value, report


def _sum_over_fwd(f, shared, constants, pieces):
    value_and_grad = jax.value_and_grad(f, has_aux=True)

    def step(carry, piece):
        total, gradient = carry
        outcome, one = value_and_grad(shared, constants, piece)
        total, report = _add(total, outcome)
        return (total, jax.tree.map(jnp.add, gradient, one)), report

    # Sums of many small terms: accumulate in float32, independent of the compute dtype.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shared)
    (total, gradient), reports = jax.lax.scan(step, (jnp.zeros(()), zeros), pieces)
    return (total, reports), jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, shared)


def _sum_over_bwd(f, gradient, cotangent):
    return jax.tree.map(lambda g: (g * cotangent[0]).astype(g.dtype), gradient), None, None


sum_over.defvjp(_sum_over_fwd, _sum_over_bwd)
