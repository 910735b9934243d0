"""Attention over pages and rings against the definition, with few and with many pages a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.verify_attention import reference
from tests.tiny import causal_attention

B, N, K, H, Z = 3, 4, 2, 8, 4
LENGTH = 61


def rows(seed: int, heads: int):
    return jax.random.normal(jax.random.key(seed), (B, LENGTH, heads, H))


def over_pages(q, k, v, *, table, chunk: int, window, sinks, block_pages: int):
    """Writes and attends `chunk` positions at a time, as prefill and rounds do."""
    pages = [jnp.full((int(table.max()) + 1, Z, K, H), jnp.nan)] * 2
    outs = []
    for start in range(0, LENGTH, chunk):
        part = slice(start, start + chunk)
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[part], (B, len(range(LENGTH)[part])))
        where = dict(page_table=table, positions=positions, ring=window is not None)
        pages = write_kv(*pages, k[:, part], v[:, part], **where)
        # Unwritten slots are NaN above, so that an unmasked read shows; a real cache starts at zero.
        clean = [jnp.nan_to_num(page, nan=1e4) for page in pages]
        outs.append(
            reference.attend(
                q[:, part], *clean, table, positions, H**-0.5, window, sinks, block_pages
            )
        )
    return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize("sinks", [None, jnp.array([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_attention_equals_the_definition(chunk, window, sinks):
    q, k, v = rows(0, N), rows(1, K), rows(2, K)
    want, _ = causal_attention(q, k, v, None, window=window, sinks=sinks)
    width = -(-(LENGTH if window is None else window - 1 + chunk) // Z)
    table = 1 + jnp.asarray(np.random.default_rng(0).permutation(B * width).reshape(B, width))
    outs = [
        over_pages(q, k, v, table=table, chunk=chunk, window=window, sinks=sinks, block_pages=size)
        for size in (1, 3, width)
    ]
    for out in outs:
        np.testing.assert_allclose(out, want, atol=3e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_does_not_depend_on_the_rows_of_its_call_or_the_size_of_its_ring(window):
    q, k, v = rows(0, N), rows(1, K), rows(2, K)
    outs = []
    for chunk, spare in ((1, 0), (2, 1), (7, 5)):
        width = -(-(LENGTH if window is None else window - 1 + chunk) // Z) + spare
        table = 1 + jnp.arange(B * width).reshape(B, width)
        options = dict(chunk=chunk, window=window, sinks=None, block_pages=1)
        outs.append(np.asarray(over_pages(q, k, v, table=table, **options)))
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=2e-6)
