"""Tiles of a weight on their way through a GEMM kernel: stored bits, operands, float32 sums.

A `format.Format` joins two parts, so every storage format works on every chip:

- a codec (`codecs`): how the stored bits become operands; `mxfp4` has the bit operations of MXFP4.
- an MMA (matrix multiply-accumulate, `mma`): how a chip's tensor cores multiply; `mma_sm90` (wgmma,
  Hopper) and `mma_sm100` (tcgen05, Blackwell in data centres) implement it.

`warpgroups` is for blocks of several warpgroups. Start with the drawing in `format`.
"""
