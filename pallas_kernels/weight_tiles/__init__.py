"""Tiles of a weight on their way through a GEMM kernel: stored bits, bfloat16 operands, float32 sums.

`format.Format` is a codec times an MMA:

- `codecs`: how the stored bits become bfloat16 operands, for each storage format (`mxfp4` has its bits).
- `mma`: the contract of a chip's tensor cores; `mma_sm90` (wgmma) and `mma_sm100` (tcgen05) fulfil it.
"""
