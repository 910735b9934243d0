"""Rows of a ragged round: sequence b has n_b + 1 rows, and all sequences lie one after the other.

With n = [2, 0, 1] the flat rows are (0,0) (0,1) (0,2) (1,0) (2,0) (2,1), each (sequence, row). Rows that
are left over at the end are padding. Models compute flat rows; attention and the acceptance rule see
[B, T] again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class FlatRows(NamedTuple):
    """The rows of B sequences, at most T each, among F flat rows."""

    at: jax.Array
    """[B, T] int32: flat row of row j of each sequence; past its last row, the flat row of the last."""
    sequence: jax.Array
    """[F] int32 in 0..B-1; of padding B-1."""
    row: jax.Array
    """[F] int32 in 0..T-1; of padding 0."""
    is_real: jax.Array
    """[F] bool: False for padding."""

    @classmethod
    def of(cls, num_drafts: jax.Array, num_flat: int, most: int) -> "FlatRows":
        """The rows of sequences with `num_drafts` [B] int32 drafts each, in 0..most.

        Args:
          num_flat: F, at least the sum of `num_drafts` and B.
          most: T - 1.
        """
        ends = jnp.cumsum(num_drafts + 1)
        first = ends - num_drafts - 1
        flat = jnp.arange(num_flat, dtype=jnp.int32)
        sequence = (ends <= flat[:, None]).sum(axis=1, dtype=jnp.int32)
        is_real = sequence < len(ends)
        sequence = jnp.minimum(sequence, len(ends) - 1)
        row = jnp.where(is_real, flat - first[sequence], 0)
        at = first[:, None] + jnp.minimum(jnp.arange(most + 1), num_drafts[:, None])
        return cls(at.astype(jnp.int32), sequence, row.astype(jnp.int32), is_real)

    def batched(self, x: jax.Array) -> jax.Array:
        """Flat rows x [F, ...] -> [B, T, ...]; past the last row of a sequence, its last row again."""
        return x[self.at]

    def flat(self, x: jax.Array) -> jax.Array:
        """Rows x [B, T, ...] -> [F, ...]."""
        return x[self.sequence, self.row]
