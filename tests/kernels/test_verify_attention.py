"""Attention over pages and rings against the definition, with few and with many pages a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write.reference import write_kv
from pallas_kernels.verify_attention import reference
from tests.tiny import attention_of_heads

B, N, K, H, Z = 2, 4, 2, 8, 4
LENGTH = 24
SINKS = jnp.array([0.5, -1.0, 2.0, 0.0])


def rows(seed: int, heads: int):
    return jax.random.normal(jax.random.key(seed), (B, LENGTH, heads, H))


@functools.partial(jax.jit, static_argnames=("chunk", "window", "block_pages"))
def over_pages(q, k, v, table, sinks, *, chunk: int, window: int | None, block_pages: int):
    """Writes and attends `chunk` positions at a time, as prefill and rounds do."""

    def step(pages, start):
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (B, chunk))
        part = [jax.lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (q, k, v)]
        pages = write_kv(*pages, *part[1:], table, positions, window is not None)
        out = reference.attend(
            part[0], *pages, table, positions, H**-0.5, window, sinks, block_pages
        )
        return pages, out

    # What was never written is huge, so that reading it would show.
    pages = (jnp.full((table.size + 1, Z, K, H), 1e4),) * 2
    _, outs = jax.lax.scan(step, pages, jnp.arange(0, LENGTH, chunk))
    return jnp.moveaxis(outs, 0, 1).reshape(B, LENGTH, N, H)


def page_table(window: int | None, chunk: int, spare: int = 0):
    """Scattered pages: all that the sequence needs, or a ring of the window and one call's rows."""
    width = -(-(LENGTH if window is None else window - 1 + chunk) // Z) + spare
    order = np.random.default_rng(0).permutation(B * width)
    return jnp.asarray(1 + order.reshape(B, width))


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize(
    ("chunk", "window", "sinks"),
    [
        (1, None, None),
        (8, None, SINKS),
        (1, 1, None),
        (3, 1, SINKS),
        (1, 5, SINKS),
        (3, 5, None),
        (8, 5, SINKS),
        (8, 16, None),
    ],
)
def test_attention_equals_the_definition(chunk, window, sinks):
    q, k, v = rows(0, N), rows(1, K), rows(2, K)
    want = attention_of_heads(q, k, v, window=window, sinks=sinks)
    table = page_table(window, chunk)
    for size in {1, table.shape[1]}:
        options = dict(chunk=chunk, window=window, block_pages=size)
        out = over_pages(q, k, v, table, sinks, **options)
        np.testing.assert_allclose(out, want, atol=3e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_does_not_depend_on_the_rows_of_its_call_or_the_size_of_its_ring(window):
    q, k, v = rows(0, N), rows(1, K), rows(2, K)
    outs = []
    for chunk, spare in ((1, 0), (2, 1), (8, 5)):
        options = dict(chunk=chunk, window=window, block_pages=1)
        outs.append(over_pages(q, k, v, page_table(window, chunk, spare), None, **options))
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=2e-6)
