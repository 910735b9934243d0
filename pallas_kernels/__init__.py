"""Operations of the decode round, one folder each.

`api.py` is the public function and selects an implementation, `reference.py` is the jnp definition,
`mosaic_*.py` are Pallas kernels.
"""
