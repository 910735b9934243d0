"""Quantised weights as released files hold them: MXFP4 of gpt-oss and the FP8 forms.

Written from the formats alone, so that `families` can store a weight and give transformers the
float32 value that the stored one stands for. Both functions are exact in the second direction.
"""

import torch

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of the codes 0..7; adding 8 to a code makes its value negative."""
FP4_BETWEEN = (FP4_VALUES[1:] + FP4_VALUES[:-1]) / 2
FP4_TOP_EXPONENT = 2  # 6 = 1.5 * 2**2
MXFP4_GROUP = 32
FP8_MAX = 448.0


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weight` [.., out, in] in groups of 32 inputs: 4-bit codes with one power of two per group.

    Returns blocks uint8 [.., out, in/32, 16], byte j holding element 2j in its low and 2j + 1 in
    its high half; scales uint8 [.., out, in/32], a scale s being 2**(s - 127); and the float32
    weight that they stand for.
    """
    groups = weight.unflatten(-1, (-1, MXFP4_GROUP))
    peak = groups.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(peak).exponent - 1 - FP4_TOP_EXPONENT
    scaled = torch.ldexp(groups, -exponent)
    magnitude = torch.bucketize(scaled.abs().contiguous(), FP4_BETWEEN)
    sign = torch.where(scaled < 0, -1.0, 1.0)
    decoded = torch.ldexp(sign * FP4_VALUES[magnitude], exponent).flatten(-2)
    code = (magnitude + 8 * (scaled < 0)).to(torch.uint8)
    blocks = code[..., 0::2] | code[..., 1::2] << 4
    return blocks, (exponent + 127)[..., 0].to(torch.uint8), decoded


def fp8(
    weight: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weight` [out, in] as E4M3 with one scale per block of `block` = (rows, columns).

    The last block of an axis may be smaller: it is cut, not padded in the file. Returns the E4M3
    weight [out, in]; scales [ceil(out/rows), ceil(in/columns)] to multiply by; and the float32
    weight that they stand for.
    """
    rows, columns = weight.shape
    spread = lambda scales: scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(
        block[1], 1
    )[:, :columns]
    peak = torch.stack(
        [
            torch.stack([tile.abs().max() for tile in band.split(block[1], 1)])
            for band in weight.split(block[0], 0)
        ]
    )
    scales = (peak / FP8_MAX).to(scale_dtype)
    stored = (weight / spread(scales.float())).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * spread(scales.float())
