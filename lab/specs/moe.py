"""Mixture-of-experts workloads of supported models by kernel, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from lab.specs.block_gemm import (
    MMA_OF_QUANTIZED_ROWS,
    Form,
    chips_of,
    random_leaf,
    weight_of,
)
from pallas_kernels import dispatch, formats
from pallas_kernels.activations import Activations, Quantized, dequantize, quantize
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.moe import reference
from pallas_kernels.moe.paths import Routing, TuningConfig
from pallas_kernels.moe.reference import Choice, ExpertWeights
from pallas_kernels.moe.worklist import Worklist, make_worklist, own_items
from pallas_kernels.rms_norm.api import add_rms_norm

MMA = {90: "wgmma", 100: "tcgen05.mma"}
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
        """Chips with the kernel."""
        if self.kernel in ("norm_product", "norm_route"):
            return (90,)
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


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel and its argument shapes."""
    return _BUILD[spec.kernel](spec)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; items by ascending expert, slots all distinct."""
    shapes = build(spec)[1]
    keys = [jax.random.fold_in(key, i) for i in range(len(shapes))]
    normal = lambda x, key: jax.random.normal(key, x.shape).astype(x.dtype)
    if spec.kernel in ("gate_up", "down"):
        count = jnp.full(1, spec.items, jnp.int32)
        plan = _experts_of_items(spec, key), count
        if spec.quantized:
            *weight, _ = map(random_leaf, shapes[3:], keys[3:])
            x, x_scale = quantize(jax.random.normal(keys[0], shapes[0].shape))
            return x, *plan, *weight, x_scale
        return normal(shapes[0], keys[0]), *plan, *map(random_leaf, shapes[3:], keys[3:])
    arrays = list(map(normal, shapes, keys))
    if spec.kernel == "spread":
        slots = jax.random.permutation(key, spec.top_k * spec.rows)
        arrays[1] = slots.reshape(shapes[1].shape).astype(jnp.int32)
    if spec.own:
        arrays[-1] = jnp.int32(spec.own)
    return tuple(arrays)


def bytes(spec: Spec) -> int:
    """Minimum memory traffic: each argument and result once, of the weights only touched
    experts."""
    function, args = build(spec)
    with dispatch.references():
        results = jax.tree.leaves(jax.eval_shape(function, *args))
    size = lambda x: x.size * x.dtype.itemsize
    moved = sum(map(size, (*args, *results)))
    if spec.kernel in ("gate_up", "down"):
        weights = sum(map(size, args[3:]))
        moved -= weights - weights * min(spec.items, spec.experts) // spec.experts
    return moved


def compared(spec: Spec, results: Any) -> Any:
    """The results without padding. Of a norm with its router only the rows: a rounding may decide
    between two experts."""
    if spec.kernel == "norm_route":
        return results[:3]
    if spec.kernel not in ("plan", "place"):
        return results
    weights, slots, experts, num_items = results
    R = spec.rows
    return weights[:, :R], slots[:, :R], experts[: _routing(spec, None).items], num_items[:1]


def _experts_of_items(spec: Spec, key: jax.Array) -> jax.Array:
    """int32 [items], ascending: as many distinct experts as possible, all about equally often."""
    once = min(spec.items, spec.experts)
    chosen = jnp.sort(jax.random.permutation(key, spec.experts)[:once])
    return chosen[jnp.arange(spec.items) * once // spec.items].astype(jnp.int32)


def _config(spec: Spec) -> TuningConfig:
    """The default's, of the kernel and of its reference alike: on a CPU that of an H200, which the
    interpreter imitates."""
    device = dispatch.device()
    return TuningConfig.choose(
        spec.rows,
        spec.experts,
        spec.top_k,
        hopper=device.platform == "cpu" or device.sm == 90,
        quantized=spec.quantized,
        tiled=spec.in_tiles,
    )


def _routing(spec: Spec, launch: dispatch.Launch | None) -> Routing:
    """`launch` is None of the reference, which has the same items."""
    choice = Choice(spec.top_k, spec.normalize)
    return Routing.of(spec.rows, spec.experts, choice, _config(spec), launch)


def _x_dtype(spec: Spec) -> jnp.dtype:
    if spec.quantized:
        return jnp.dtype(jnp.float8_e4m3fn)
    return jnp.dtype(jnp.float16 if spec.in_tiles and spec.kernel == "gate_up" else jnp.bfloat16)


def _rows_of(spec: Spec, x: jax.Array, leaves: tuple) -> tuple[jax.Array, tuple]:
    """(the rows that x stands for, leaves of the weight), from the arguments of gate_up or down."""
    if not spec.quantized:
        return x.astype(jnp.float32) if x.dtype == jnp.float16 else x, leaves
    return dequantize(Quantized(x, leaves[-1])), leaves[:-1]


def _launch(chips: tuple[int, ...] = dispatch.CHIPS) -> dispatch.Launch | None:
    return dispatch.resolve("moe", "mosaic_gpu", chips=chips)


def _made(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _plan(spec: Spec) -> tuple[Callable, tuple]:
    """logits [R, E][, bias [E]][, first []] -> weights, slots [k, R], experts [items], num_items
    [1]; a kernel pads all."""

    def run(logits, *more):
        first = more[-1] if spec.own else None
        bias = more[0] if spec.bias else None
        config = _config(spec)
        if launch := _launch():
            from pallas_kernels.moe import mosaic_plan

            routing = _routing(spec, launch)
            return mosaic_plan.route_and_plan(logits, bias, routing, first, spec.own or None)
        weights, slots, experts, num_items = _sorted_by_definition(spec, logits, bias)
        if first is None:
            return weights, slots, experts, num_items
        work = Worklist(experts, num_items, slots, experts.size)
        work, weights = own_items(work, weights, first, spec.own, config.tokens)
        return weights, work.slots, work.experts, work.num_items

    return run, (*_logits(spec), *([_made(jnp.int32)] if spec.own else []))


def _norm(spec: Spec) -> tuple[Callable, tuple]:
    """h [R, width], parts [parts, R, width], scale [width], weight [E, width][, bias [width][,
    router bias [E]]] -> sum, normed twice [R, width], and as `_plan`; of norm_product the logits
    float32 [R, E] instead."""
    dtypes = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
    is_planned = spec.kernel == "norm_route"

    def run(h, parts, scale, weight, bias=None, router_bias=None):
        if launch := _launch(spec.chips):
            from pallas_kernels.moe import mosaic_norm

            if not is_planned:
                return mosaic_norm.norm_and_product(
                    h, parts, bias, scale, weight, eps=1e-6, launch=launch, out_dtypes=dtypes
                )
            arrays = h, parts, bias, scale, weight, router_bias
            routing = _routing(spec, launch)
            return mosaic_norm.norm_and_route(*arrays, routing, eps=1e-6, out_dtypes=dtypes)
        rows = add_rms_norm(h, parts, scale, eps=1e-6, bias=bias, out_dtypes=dtypes)
        logits = linear(rows[1], weight, out_dtype=jnp.float32)
        return *rows, *(
            _sorted_by_definition(spec, logits, router_bias) if is_planned else [logits]
        )

    row = spec.rows, spec.width
    h, parts = _made(jnp.bfloat16, *row), _made(jnp.float32, spec.parts, *row)
    scale, weight = (_made(jnp.bfloat16, *size, spec.width) for size in ((), (spec.experts,)))
    biases = _made(jnp.bfloat16, spec.width), _made(jnp.bfloat16, spec.experts)
    return run, (h, parts, scale, weight, *(biases[: 1 + is_planned] if spec.bias else ()))


def _place(spec: Spec) -> tuple[Callable, tuple]:
    """As `_plan`, for more rows."""

    def run(logits, bias=None):
        if launch := _launch():
            from pallas_kernels.moe import mosaic_route

            return mosaic_route.route_and_place(logits, bias, _routing(spec, launch))
        return _sorted_by_definition(spec, logits, bias)

    return run, _logits(spec)


def _sorted_by_definition(spec: Spec, logits, bias) -> tuple[jax.Array, ...]:
    config = _config(spec)
    weights, ids = _route_by_definition(spec, logits, bias)
    work = make_worklist(ids.T, spec.experts, config.tokens, config.shared)
    return weights.T, work.slots, work.experts, work.num_items


def _spread(spec: Spec) -> tuple[Callable, tuple]:
    """x [R, width], slots [k, R], a permutation of the buffer's rows -> the buffer
    [k * R, width]."""
    size = spec.top_k * spec.rows

    def run(x, slots):
        if launch := _launch():
            from pallas_kernels.quantize import mosaic_gpu

            return mosaic_gpu.spread(x, slots, size, launch)
        copies = jnp.broadcast_to(x, (*slots.shape, spec.width))
        return jnp.zeros((size, spec.width), x.dtype).at[slots].set(copies)

    args = _made(jnp.bfloat16, spec.rows, spec.width), _made(jnp.int32, spec.top_k, spec.rows)
    return run, args


def _gate_up(spec: Spec) -> tuple[Callable, tuple]:
    """x [rows, width], experts [items], num_items [1], weight -> bfloat16
    [items * tokens, inner]."""
    config = _config(spec)

    def run(x, experts, num_items, *leaves):
        rows, weight = _rows_of(spec, x, leaves)
        weight = _weight(spec, weight)
        if launch := _launch(spec.chips):
            from pallas_kernels.moe import mosaic_gpu

            return mosaic_gpu.gate_up(
                x,
                weight,
                experts,
                num_items,
                spec.items,
                spec.limit,
                config,
                launch,
                spec.arranged,
                _scale_of(spec, leaves),
            )
        x = rows
        own = jnp.broadcast_to(x, (spec.items, *x.shape)) if config.shared else x
        both = _products(own.reshape(spec.items, -1, x.shape[-1]), experts, weight)
        inner = reference.activate(both[..., 0, :], both[..., 1, :], spec.limit)
        return _arranged(spec, inner.reshape(-1, spec.inner).astype(jnp.bfloat16))

    rows = config.tokens * (1 if config.shared else spec.items)
    return run, _items(spec, rows, spec.width, (2, spec.inner))


def _down(spec: Spec) -> tuple[Callable, tuple]:
    """inner [items * tokens, inner], experts, num_items, weight -> bfloat16
    [items * tokens, width]."""
    config = _config(spec)

    def run(inner, experts, num_items, *leaves):
        rows, weight = _rows_of(spec, inner, leaves)
        weight = _weight(spec, weight)
        if launch := _launch(spec.chips):
            from pallas_kernels.moe import mosaic_gpu

            return mosaic_gpu.down(
                inner,
                weight,
                experts,
                num_items,
                spec.items,
                config,
                launch,
                spec.arranged,
                _scale_of(spec, leaves),
            )
        own = rows.reshape(spec.items, -1, rows.shape[-1])
        made = _products(own, experts, weight, lambda columns: _arranged(spec, columns))
        return made.reshape(-1, spec.width).astype(jnp.bfloat16)

    return run, _items(spec, config.tokens * spec.items, spec.inner, (spec.width,))


_BUILD = dict(
    norm_product=_norm,
    norm_route=_norm,
    plan=_plan,
    place=_place,
    spread=_spread,
    gate_up=_gate_up,
    down=_down,
)


def _logits(spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    logits = _made(jnp.float32, spec.rows, spec.experts)
    return (logits, _made(jnp.bfloat16, spec.experts)) if spec.bias else (logits,)


def _items(spec: Spec, rows: int, K: int, outputs: tuple[int, ...]) -> tuple:
    """Shapes of x [rows, K], experts, num_items, values[, scale][, bias] of [E, *outputs,
    K][, x_scale]."""
    x_scale = jax.eval_shape(quantize, _made(jnp.bfloat16, rows, K)).scale
    return (
        _made(_x_dtype(spec), rows, K),
        _made(jnp.int32, spec.items),
        _made(jnp.int32, 1),
        *weight_of(spec.form, spec.experts, *outputs, K),
        *([_made(jnp.bfloat16, spec.experts, *outputs)] if spec.bias else []),
        *([x_scale] if spec.quantized else []),
    )


def _scale_of(spec: Spec, leaves: tuple) -> jax.Array | None:
    """The scale of x, the last argument of gate_up or down, if it has one."""
    return leaves[-1] if spec.quantized else None


def _weight(spec: Spec, leaves: tuple) -> ExpertWeights:
    values, *others = leaves
    scale = None if spec.form == "bf16" else others.pop(0)
    return ExpertWeights(values, scale, *others)


def _route_by_definition(spec: Spec, logits, bias) -> tuple[jax.Array, jax.Array]:
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return reference.route(logits, spec.top_k, spec.normalize)


def _arranged(spec: Spec, columns: jax.Array) -> jax.Array:
    """Columns in the order of the inner activations between the two products."""
    from pallas_kernels.weight_tiles.mxfp4 import arrange  # a slow import

    return arrange(columns) if spec.arranged else columns


def _products(
    x: jax.Array, experts: jax.Array, weight: ExpertWeights, order: Callable = lambda weight: weight
) -> jax.Array:
    """x [items, tokens, K] times the expert's weight of [E, ..., N, K] -> [items, tokens, ..., N].

    `order` permutes a weight's columns to the order of x.
    """

    def one(item):
        rows, expert = item
        values, scale, bias = jax.tree.map(lambda leaf: leaf[expert], weight)
        unpacked = order(formats.dequantize(values, scale, rows.dtype))
        product = lax.dot_general(
            rows,
            unpacked,
            (((1,), (unpacked.ndim - 1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return product if bias is None else product + bias.astype(jnp.float32)

    return lax.map(one, (x, experts))
