"""Sizes of what shares a scale; for code that imports no jax."""

BLOCK = 128
"""Rows and columns of a block with one fp8 scale."""
GROUP = 32
"""Columns of a group with one mxfp4 scale."""
