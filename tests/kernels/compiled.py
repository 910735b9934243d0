"""Definitions of kernels as one program each; outside of `jax.jit` each operation is one."""

from functools import cache, partial

import jax

from pallas_kernels import formats
from pallas_kernels.moe import reference, worklist

dequantize = jax.jit(formats.dequantize, static_argnums=2)
routed = jax.jit(reference.route, static_argnums=(1, 2))
moe = jax.jit(reference.moe, static_argnums=(5, 6))


@cache
def _compiled(function, static: tuple):
    return jax.jit(partial(function, implementation="reference", **dict(static)))


def referenced(function, *args, **options):
    """`function(*args, implementation="reference", **options)`, jitted."""
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = tuple(sorted((name, x) for name, x in options.items() if name not in arrays))
    return _compiled(function, static)(*args, **arrays)


def make_worklist(ids: jax.Array, E: int, tokens: int, shared: bool) -> worklist.Worklist:
    items = worklist.most_items(ids.shape[1], E, ids.shape[0], tokens, shared)
    return worklist.Worklist(*_worklist(ids, E, tokens, shared), items)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _worklist(*args):
    return worklist.make_worklist(*args)[:3]
