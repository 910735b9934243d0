"""Shapes of the mixtures of experts of supported models, by kernel: `specs` makes calls of them."""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.activations import Activations
from pallas_kernels.block_gemm.specs import MMA_OF_QUANTIZED_ROWS, Form, chips_of
from pallas_kernels.moe import paths

CHIPS = paths.CHIPS
MMA = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
"""Required matrix instruction of gate_up and down, by chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One kernel on bfloat16 rows, gate_up of tiles on float16 rows: experts [E, 2, inner, width]
    and [E, width, inner].

    Attributes:
      kernel: norm_product is `mosaic_norm.norm_and_product`, norm_route
        `mosaic_norm.norm_and_route`, plan `mosaic_plan.route_and_plan`, place
        `mosaic_route.route_and_place`. The other names are those of the functions.
      items: items of gate_up and down, about as many as random routing gives; they touch as many
        experts as possible.
      form: format of the experts' weights.
      bias: whether the router, or the experts, have a bias; norm_route and
        norm_product: also the sum of the parts.
      parts, normalize: of norm_route; parts also of norm_product.
      own: plan: experts of a device that has not all of them; 0: it has all.
      activations: "fp8": gate_up and down take quantised rows.
    """

    kernel: Literal["norm_product", "norm_route", "plan", "place", "spread", "gate_up", "down"]
    rows: int
    items: int = 0
    experts: int = 128
    top_k: int = 8
    width: int = 2048
    inner: int = 768
    form: Form = "fp8"
    bias: bool = False
    parts: int = 4
    normalize: bool = True
    own: int = 0
    limit: float | None = None
    activations: Activations = "bf16"

    @property
    def chips(self) -> tuple[int, ...]:
        """Chips with the kernel: RTX cards have shared memory for the counts of fewer rows."""
        if self.kernel in ("norm_product", "norm_route"):
            return (90,)
        if self.kernel == "place" and self.rows > 8192:
            return (90, 100)
        return chips_of(self.form)

    @property
    def in_tiles(self) -> bool:
        """Whether the weights lie in tiles."""
        return self.form.startswith("fp8_tiles")

    @property
    def arranged(self) -> bool:
        """Whether gate_up stores its columns in `arrange` order for down."""
        return self.form == "mxfp4"

    @property
    def mma(self) -> dict[int, str]:
        """Required matrix instruction, as `MMA`."""
        if self.kernel in ("norm_product", "norm_route"):
            return MMA
        if self.kernel not in ("gate_up", "down"):
            return {}
        return MMA_OF_QUANTIZED_ROWS if self.activations == "fp8" else MMA

    @property
    def quantized(self) -> bool:
        """Whether gate_up and down take rows of e4m3 and their scales."""
        return self.activations == "fp8"


_ITEMS = {8: 51, 12: 69, 64: 129, 256: 131, 512: 128, 1024: 130, 4096: 514}
GPT_OSS = dict(experts=32, top_k=4, width=2880, inner=2880, bias=True)

SPECS = {
    **{
        f"qwen3-moe-{kernel.replace('_', '-')}-{R}": Spec(kernel=kernel, rows=R, items=items)
        for kernel in ("gate_up", "down")
        for R, items in _ITEMS.items()
    },
    **{
        f"qwen3-moe-tiles-{kernel.replace('_', '-')}-{R}": Spec(
            kernel=kernel, rows=R, items=items, form="fp8_tiles"
        )
        for kernel in ("gate_up", "down")
        for R, items in _ITEMS.items()
    },
    **{f"qwen3-moe-plan-{R}": Spec(kernel="plan", rows=R) for R in (1, 8, 12, 64, 128, 200, 256)},
    **{f"qwen3-moe-norm-route-{R}": Spec(kernel="norm_route", rows=R) for R in (1, 8, 12)},
    "norm-route-16-of-8-parts": Spec(kernel="norm_route", rows=16, parts=8),
    "norm-route-16-bias": Spec(kernel="norm_route", rows=16, parts=8, bias=True, normalize=False),
    "norm-route-16-narrow": Spec(kernel="norm_route", rows=16, parts=8, width=1024),
    **{f"qwen3-moe-norm-product-{R}": Spec(kernel="norm_product", rows=R) for R in (20, 64, 128)},
    "norm-product-72-bias": Spec(kernel="norm_product", rows=72, parts=8, bias=True),
    "norm-product-64-narrow": Spec(kernel="norm_product", rows=64, parts=8, width=1024),
    **{f"qwen3-moe-place-{R}": Spec(kernel="place", rows=R) for R in (512, 1024, 4096, 16384)},
    **{f"qwen3-moe-spread-{R}": Spec(kernel="spread", rows=R) for R in (64, 256, 512, 1024, 4096)},
    **{
        f"gpt-oss-{kernel.replace('_', '-')}-{R}": Spec(
            kernel=kernel, rows=R, items=items, limit=7.0, form="bf16", **GPT_OSS
        )
        for kernel in ("gate_up", "down")
        for R, items in ((8, 21), (64, 37))
    },
    **{
        f"gpt-oss-mxfp4-{kernel.replace('_', '-')}-{R}": Spec(
            kernel=kernel, rows=R, items=items, limit=7.0, form="mxfp4", **GPT_OSS
        )
        for kernel in ("gate_up", "down")
        for R, items in ((8, 21), (12, 26), (64, 37), (256, 32), (4096, 224))
    },
    **{
        f"per-row-{kernel.replace('_', '-')}-64": Spec(
            kernel=kernel, rows=64, items=129, form="fp8_rows"
        )
        for kernel in ("gate_up", "down")
    },
    "per-row-tiles-gate-up-64": Spec(kernel="gate_up", rows=64, items=129, form="fp8_tiles_rows"),
    **{
        f"qwen3-moe-fp8-{kernel.replace('_', '-')}-{R}": Spec(
            kernel=kernel, rows=R, items=items, activations="fp8"
        )
        for kernel in ("gate_up", "down")
        for R, items in ((8, 51), (64, 129), (256, 128), (1024, 192), (4096, 320))
    },
    **{f"gpt-oss-plan-{R}": Spec(kernel="plan", rows=R, **GPT_OSS) for R in (8, 64, 256)},
    "qwen3-moe-plan-own-64": Spec(kernel="plan", rows=64, own=64),
    "gpt-oss-place-4096": Spec(kernel="place", rows=4096, **GPT_OSS),
    # Of no supported model: Mosaic copies columns by TMA in tiles of 32, so these are padded.
    "experts-60-plan-64": Spec(kernel="plan", rows=64, experts=60, top_k=4),
    "experts-72-place-512": Spec(kernel="place", rows=512, experts=72, top_k=10),
    "gpt-oss-spread-64": Spec(kernel="spread", rows=64, **GPT_OSS),
}
