"""Ways from the residual stream to the results of the experts; a call takes the first that fits.

    path           norm and router's product            choice of experts and worklist
    norm_route     moe_norm_and_route                   (the same kernel)
    norm_product   moe_norm_and_product                 moe_route_and_plan
    plan           add_rms_norm, block_gemm             moe_route_and_plan
    place          add_rms_norm, block_gemm             moe_route_and_count, moe_place
    sort           add_rms_norm, block_gemm             moe_route_and_count, XLA
    tpu            add_rms_norm and block_gemm in XLA   XLA
    reference      the same                             (no worklist)

All but the last two end in the kernels of `mosaic_gpu`, `tpu` in those of `mosaic_tpu`. A row has
the same bits on each path of a GPU. Nothing here imports a kernel, which is slow and which CPU use
does not need.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.activations import are_quantized, dtype_refusal
from pallas_kernels.block_gemm.api import CHIPS_OF
from pallas_kernels.device import Device
from pallas_kernels.moe.reference import Choice, Experts
from pallas_kernels.moe.worklist import most_items

MOST_SHARED = 16
"""Most rows that all items share: then an item has all rows, and is one for each chosen expert."""
ROWS = 64
"""Rows of one block that routes more rows than a cluster plans."""
WIDTH = 64
"""Experts of one register array."""
_MOST_TOKENS = 80
"""Most rows of an item on Hopper: their sums of gate and up fill the registers."""


@dataclass(frozen=True)
class Call:
    """What decides the path of a call.

    Attributes:
      R, D: rows and columns of the stream.
      E, top_k: experts to choose from, of which this device may have a share, and those of a row.
      row_dtype: of the rows that the experts read.
      stream_dtype, router_dtype: of the stream and of the router's weight; None: the rows are
        normed and the logits given.
      is_share: this device has only some of the experts.
    """

    R: int
    D: int
    E: int
    top_k: int
    row_dtype: jnp.dtype
    stream_dtype: jnp.dtype | None = None
    router_dtype: jnp.dtype | None = None
    is_share: bool = False


def padded_experts(E: int) -> int:
    """E rounded up to the register width; experts past E get a logit of -inf."""
    return -(-E // WIDTH) * WIDTH


def _takes_norm_product(call: Call, device: Device) -> bool:
    """Clusters of eight blocks; up to eight of them, of 16 rows, always run at once. The strips of
    a row are whole, and 16 rows of 4,096 columns exceed the shared memory of a block."""
    dtypes = call.stream_dtype, call.router_dtype
    fits = call.R <= 128 and call.E == 128 and call.D in (1024, 2048)
    return fits and dtypes == (jnp.bfloat16, jnp.bfloat16) and device.sm == 90


def _takes_plan(call: Call, device: Device) -> bool:
    """One cluster of blocks. The code that adds up a row's powers grows with top_k."""
    return call.R <= 256 and call.E <= 128 and call.top_k <= 64


def _takes_norm_route(call: Call, device: Device) -> bool:
    """One block plans."""
    few = call.R <= 16 and not call.is_share
    return few and _takes_norm_product(call, device) and _takes_plan(call, device)


def _takes_place(call: Call, device: Device) -> bool:
    """Each block has the counts of all blocks in shared memory. Its items share no rows."""
    blocks, Ep = -(-call.R // ROWS), padded_experts(call.E)
    fits = blocks <= 256 and Ep <= 256 and 4 * Ep * (blocks + 16) <= device.smem_bytes
    return fits and call.R > MOST_SHARED


PATHS: dict[str, Callable[[Call, Device], bool]] = {
    "norm_route": _takes_norm_route,
    "norm_product": lambda *call: _takes_norm_product(*call) and _takes_plan(*call),
    "plan": _takes_plan,
    "place": _takes_place,
    "sort": lambda *_: True,
}
"""Paths of a GPU, in order: whether a call may take it."""


@dataclass(frozen=True)
class TuningConfig:
    """Tile sizes; the result's bits do not depend on them.

    Attributes:
      tokens: rows of an item: 8, 16, 32 or 64; on Hopper any multiple of 8 up to 80, and 128
        quantised rows, whose weights are not unpacked in registers.
      shared: all items read the same rows of x, so rows need no sorting by expert.
      stages: preferred pipeline stages of gate_up and down, see `Format.stages`.
    """

    tokens: int
    shared: bool
    stages: tuple[int, int]

    @classmethod
    def choose(
        cls, R: int, E: int, top_k: int, *, hopper: bool, quantized: bool, tiled: bool = False
    ) -> "TuningConfig":
        """Config for R rows, which are quantised or not, and weights whose tiles are contiguous or
        not.

        An item loads and unpacks the weights of its expert again, so most experts should need the
        fewest items possible. An expert has `busy` rows on average, and their deviation is about
        the root of it.
        """
        if R <= MOST_SHARED:
            return cls(8 if R <= 8 else 16, True, (4 if tiled else 2, 3))
        busy = R * top_k / E
        tokens = next((t for t in (8, 16, 32) if t >= 1.5 * busy), 64)
        if R <= 64:
            return cls(tokens, False, {32: (4, 2), 64: (2, 2)}.get(tokens, (2, 3)))
        if hopper and quantized and busy > 96:
            return cls(128, False, (2, 3))
        if hopper and not quantized:
            enough = busy + 2 * math.sqrt(busy)  # for most experts
            tokens = 8 * math.ceil(enough / math.ceil(enough / _MOST_TOKENS) / 8)
        return cls(tokens, False, (2, 2))


@dataclass(frozen=True)
class Routing:
    """Static facts of kernels that choose experts and make the worklist.

    Attributes:
      top_k, normalize: as in `Choice`.
      tokens, shared: as in `TuningConfig`.
      items: upper bound of the number of items.
      launch: None of the reference.
    """

    top_k: int
    normalize: bool
    tokens: int
    shared: bool
    items: int
    launch: dispatch.Launch | None

    @classmethod
    def of(
        cls, R: int, E: int, choice: Choice, config: TuningConfig, launch: dispatch.Launch | None
    ) -> "Routing":
        """That of R rows and E experts."""
        tokens, shared = config.tokens, config.shared
        items = most_items(R, E, choice.top_k, tokens, shared)
        return cls(choice.top_k, choice.normalize, tokens, shared, items, launch)


@dataclass(frozen=True)
class Path:
    """How a call is computed.

    Attributes:
      name: "reference", "tpu" or one of `PATHS`.
      launch: of the kernels; None of the reference.
      config: of the kernels of a GPU; None on other paths.
    """

    name: str
    launch: dispatch.Launch | None = None
    config: TuningConfig | None = None


def resolve(
    call: Call, experts: Experts, implementation: dispatch.Implementation | None = None
) -> Path:
    """Raises the errors of `dispatch.resolve`."""
    weights = experts.gate_up, experts.down
    quantized = [are_quantized(experts.activations, w.values, w.scale) for w in weights]
    refusal = _refusal(call, experts, any(quantized), implementation)
    tpu_refusal = None
    if dispatch.platform() == "tpu" or implementation == "mosaic_tpu":
        from pallas_kernels.moe import mosaic_tpu  # a slow import that other platforms do not need

        tpu_refusal = mosaic_tpu.refusal(call.row_dtype, *weights)
        if any(quantized):
            tpu_refusal = "it has no kernel for fp8 activations on a TPU"
    kinds = {formats.kind(w.values, w.scale) for w in weights}
    chips = next((CHIPS_OF[kind] for kind in kinds if kind in CHIPS_OF), dispatch.CHIPS)
    launch = dispatch.resolve(
        "moe", implementation, chips=chips, refusal=refusal, tpu_refusal=tpu_refusal
    )
    if launch is None or launch.device.platform == "tpu":
        return Path("reference" if launch is None else "tpu", launch)
    config = TuningConfig.choose(
        call.R,
        call.E,
        call.top_k,
        # Mixed products keep the powers of two up to 64, which both forms take.
        hopper=launch.device.sm == 90 and quantized[0] == quantized[1],
        quantized=all(quantized),
        tiled=kinds == {"fp8_tiles"},
    )
    name = next(name for name, takes in PATHS.items() if takes(call, launch.device))
    return Path(name, launch, config)


def _refusal(
    call: Call,
    experts: Experts,
    quantized: bool,
    implementation: dispatch.Implementation | None,
) -> str | None:
    """Why a GPU has no kernels for a call; None if it has."""
    weights = [(w.values, w.scale) for w in (experts.gate_up, experts.down)]
    found = [
        f"quantised rows are copied in units of 64 columns, not {call.D}"
        if quantized and call.D % 64
        else None,
        dtype_refusal(call.row_dtype, *weights[0]),
        f"the number of experts must be a multiple of 32, not {call.E}"
        if implementation is None and call.E % 32  # no GPU has run other numbers
        else None,
        *(formats.kernel_refusal(*weight) for weight in weights),
    ]
    if implementation is None:
        found += [formats.compile_refusal(*weight) for weight in weights]
    return next((why for why in found if why), None)
