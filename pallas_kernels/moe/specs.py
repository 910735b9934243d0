"""Mixture-of-experts workloads of supported models by kernel, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, formats
from pallas_kernels.activations import Activations, Quantized, dequantize, quantize
from pallas_kernels.block_gemm.specs import MMA_OF_QUANTIZED_ROWS, Form, random_leaf, weight_of
from pallas_kernels.device import Device
from pallas_kernels.moe import api, reference
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.moe.worklist import make_worklist, most_items

CHIPS = api.CHIPS
MMA = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
"""Required matrix instruction of gate_up and down, by chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One kernel on bfloat16 rows: experts [E, 2, inner, width] and [E, width, inner].

    Attributes:
      kernel: plan is `mosaic_plan.route_and_plan`, place `mosaic_place.route_and_place`; sort is the kernel
        `route` with XLA's worklist, which `api.mixture` takes. The other names are those of the functions.
      items: items of gate_up and down, about as many as random routing gives; they touch as many experts
        as possible.
      form: format of the experts' weights.
      bias: whether the router, or the experts, have a bias.
      activations: "fp8": gate_up and down take quantised rows.
    """

    kernel: Literal["route", "plan", "place", "sort", "spread", "gate_up", "down"]
    rows: int
    items: int = 0
    experts: int = 128
    top_k: int = 8
    width: int = 2048
    inner: int = 768
    form: Form = "fp8"
    bias: bool = False
    limit: float | None = None
    activations: Activations = "bf16"

    @property
    def chips(self) -> tuple[int, ...]:
        """Chips with the kernel: RTX cards have shared memory for the counts of fewer rows."""
        return (90, 100) if self.kernel == "place" and self.rows > 8192 else CHIPS

    @property
    def arranged(self) -> bool:
        """Whether gate_up stores its columns in `arrange` order for down."""
        return self.form == "mxfp4"

    @property
    def mma(self) -> dict[int, str]:
        """Required matrix instruction, as `MMA`."""
        if self.kernel not in ("gate_up", "down"):
            return {}
        return MMA_OF_QUANTIZED_ROWS if self.activations == "fp8" else MMA


_ITEMS = {8: 51, 12: 69, 64: 129, 256: 128, 512: 130, 1024: 190, 4096: 574}
GPT_OSS = dict(experts=32, top_k=4, width=2880, inner=2880, bias=True)

SPECS = {
    **{
        f"qwen3-moe-{kernel.replace('_', '-')}-{R}": Spec(kernel=kernel, rows=R, items=items)
        for kernel in ("gate_up", "down")
        for R, items in _ITEMS.items()
    },
    **{f"qwen3-moe-plan-{R}": Spec(kernel="plan", rows=R) for R in (1, 8, 12, 64, 128, 200, 256)},
    **{f"qwen3-moe-route-{R}": Spec(kernel="route", rows=R) for R in (300, 4096)},
    **{
        f"qwen3-moe-{kernel}-{R}": Spec(kernel=kernel, rows=R)
        for kernel in ("place", "sort")
        for R in (512, 1024, 4096, 16384)
    },
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
        for R, items in ((8, 21), (12, 26), (64, 37), (256, 40))
    },
    **{
        f"per-row-{kernel.replace('_', '-')}-64": Spec(
            kernel=kernel, rows=64, items=129, form="fp8_rows"
        )
        for kernel in ("gate_up", "down")
    },
    **{
        f"qwen3-moe-fp8-{kernel.replace('_', '-')}-{R}": Spec(
            kernel=kernel, rows=R, items=items, activations="fp8"
        )
        for kernel in ("gate_up", "down")
        for R, items in ((8, 51), (64, 129), (256, 128), (1024, 192), (4096, 320))
    },
    **{f"gpt-oss-plan-{R}": Spec(kernel="plan", rows=R, **GPT_OSS) for R in (8, 64, 256)},
    "gpt-oss-place-4096": Spec(kernel="place", rows=4096, **GPT_OSS),
    "gpt-oss-route-4096": Spec(kernel="route", rows=4096, **GPT_OSS),
    "gpt-oss-spread-64": Spec(kernel="spread", rows=64, **GPT_OSS),
}


def configs(spec: Spec, device: Device) -> list:
    """Configs for `build`: the default, then alternatives for benchmarks."""
    if spec.kernel not in ("gate_up", "down") or device.sm != 90:
        return []  # on Blackwell all of them have two stages
    chosen = _config(spec)
    used = chosen.stages[0 if spec.kernel == "gate_up" else 1]
    others = [replace(chosen, stages=(n, n)) for n in (2, 3, 4) if n != used]
    return [chosen, *others]


def build(spec: Spec, config: Any = None) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel and its argument shapes; `config` is for gate_up and down."""
    return _BUILD[spec.kernel](spec, *([] if config is None else [config]))


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; items by ascending expert, slots all distinct."""
    shapes = build(spec)[1]
    keys = [jax.random.fold_in(key, i) for i in range(len(shapes))]
    normal = lambda x, key: jax.random.normal(key, x.shape).astype(x.dtype)
    if spec.kernel in ("gate_up", "down"):
        count = jnp.full(1, spec.items, jnp.int32)
        plan = _experts_of_items(spec, key), count
        if spec.activations == "fp8":
            *weight, _ = map(random_leaf, shapes[3:], keys[3:])
            x, x_scale = quantize(jax.random.normal(keys[0], shapes[0].shape))
            return x, *plan, *weight, x_scale
        return normal(shapes[0], keys[0]), *plan, *map(random_leaf, shapes[3:], keys[3:])
    arrays = list(map(normal, shapes, keys))
    if spec.kernel == "spread":
        slots = jax.random.permutation(key, spec.top_k * spec.rows)
        arrays[1] = slots.reshape(shapes[1].shape).astype(jnp.int32)
    return tuple(arrays)


def bytes(spec: Spec) -> int:
    """Minimum memory traffic: each argument and result once, of the weights only touched experts."""
    function, args = build(spec)
    with dispatch.references():
        results = jax.tree.leaves(jax.eval_shape(function, *args))
    size = lambda x: x.size * x.dtype.itemsize
    moved = sum(map(size, (*args, *results)))
    if spec.kernel in ("gate_up", "down"):
        weights = sum(map(size, args[3:]))
        moved -= weights - weights * min(spec.items, spec.experts) // spec.experts
    return moved


def _experts_of_items(spec: Spec, key: jax.Array) -> jax.Array:
    """int32 [items], ascending: as many distinct experts as possible, all about equally often."""
    once = min(spec.items, spec.experts)
    chosen = jnp.sort(jax.random.permutation(key, spec.experts)[:once])
    return chosen[jnp.arange(spec.items) * once // spec.items].astype(jnp.int32)


def _config(spec: Spec):
    from pallas_kernels.moe import mosaic_gpu  # a slow import that references spare

    launch = _launch()
    wide = spec.activations == "fp8" and launch is not None and launch.device.sm == 90
    return mosaic_gpu.TuningConfig.choose(spec.rows, spec.experts, spec.top_k, 128 if wide else 64)


def _x_dtype(spec: Spec) -> jnp.dtype:
    return jnp.dtype(jnp.float8_e4m3fn if spec.activations == "fp8" else jnp.bfloat16)


def _rows_of(spec: Spec, x: jax.Array, leaves: tuple) -> tuple[jax.Array, tuple]:
    """(the rows that x stands for, leaves of the weight), from the arguments of gate_up or down."""
    if spec.activations == "bf16":
        return x, leaves
    return dequantize(Quantized(x, leaves[-1])), leaves[:-1]


def _launch() -> dispatch.Launch | None:
    return dispatch.resolve("moe", "mosaic_gpu", chips=CHIPS)


def _made(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _route(spec: Spec) -> tuple[Callable, tuple]:
    """logits [R, E][, bias [E]] -> weights, ids, both [k, R]."""

    def run(logits, bias=None):
        if launch := _launch():
            from pallas_kernels.moe import mosaic_route

            made = mosaic_route.route(logits, bias, spec.top_k, True, launch)
            return tuple(x[:, : spec.rows] for x in made)
        weights, ids = _route_by_definition(spec, logits, bias)
        return weights.T, ids.T

    return run, _logits(spec)


def _plan(spec: Spec) -> tuple[Callable, tuple]:
    """logits [R, E][, bias [E]] -> weights, slots [k, R], experts [items], num_items [1], unpadded."""

    def run(logits, bias=None):
        config = _config(spec)
        plan = dict(tokens=config.tokens, shared=config.shared)
        if launch := _launch():
            from pallas_kernels.moe import mosaic_plan

            items = most_items(spec.rows, spec.experts, spec.top_k, **plan)
            weights, slots, experts, num_items = mosaic_plan.route_and_plan(
                logits, bias, top_k=spec.top_k, normalize=True, items=items, launch=launch, **plan
            )
            return weights[:, : spec.rows], slots[:, : spec.rows], experts[:items], num_items[:1]
        return _sorted_by_definition(spec, logits, bias)

    return run, _logits(spec)


def _place(spec: Spec) -> tuple[Callable, tuple]:
    """As `_plan`, for more rows."""

    def run(logits, bias=None):
        if launch := _launch():
            from pallas_kernels.moe import mosaic_place

            config = _config(spec)
            items = most_items(spec.rows, spec.experts, spec.top_k, config.tokens, False)
            how = dict(top_k=spec.top_k, normalize=True, tokens=config.tokens, items=items)
            weights, slots, *work = mosaic_place.route_and_place(logits, bias, launch=launch, **how)
            return weights[:, : spec.rows], slots[:, : spec.rows], work[0][:items], work[1][:1]
        return _sorted_by_definition(spec, logits, bias)

    return run, _logits(spec)


def _sort(spec: Spec) -> tuple[Callable, tuple]:
    """As `_place`, with the worklist in XLA's code."""

    def run(logits, bias=None):
        if launch := _launch():
            from pallas_kernels.moe import mosaic_route

            weights, ids = mosaic_route.route(logits, bias, spec.top_k, True, launch)
            work = make_worklist(ids, spec.experts, _config(spec).tokens, False)
            return weights, work.slots, work.experts, work.num_items
        return _sorted_by_definition(spec, logits, bias)

    return run, _logits(spec)


def _sorted_by_definition(spec: Spec, logits, bias) -> tuple[jax.Array, ...]:
    config = _config(spec)
    weights, ids = _route_by_definition(spec, logits, bias)
    work = make_worklist(ids.T, spec.experts, config.tokens, config.shared)
    return weights.T, work.slots, work.experts, work.num_items


def _spread(spec: Spec) -> tuple[Callable, tuple]:
    """x [R, width], slots [k, R], a permutation of the buffer's rows -> the buffer [k * R, width]."""
    size = spec.top_k * spec.rows

    def run(x, slots):
        if launch := _launch():
            from pallas_kernels.moe import mosaic_route

            return mosaic_route.spread(x, slots, size, launch)
        copies = jnp.broadcast_to(x, (*slots.shape, spec.width))
        return jnp.zeros((size, spec.width), x.dtype).at[slots].set(copies)

    args = _made(jnp.bfloat16, spec.rows, spec.width), _made(jnp.int32, spec.top_k, spec.rows)
    return run, args


def _gate_up(spec: Spec, config: Any = None) -> tuple[Callable, tuple]:
    """x [rows, width], experts [items], num_items [1], weight -> bfloat16 [items * tokens, inner]."""
    config = config or _config(spec)

    def run(x, experts, num_items, *leaves):
        rows, weight = _rows_of(spec, x, leaves)
        weight = _weight(spec, weight)
        if launch := _launch():
            from pallas_kernels.moe import mosaic_gpu

            items = (experts, num_items, spec.items)
            options = (spec.limit, config, launch, spec.arranged, *_scale_of(spec, leaves))
            return mosaic_gpu.gate_up(x, weight, *items, *options)
        x = rows
        own = jnp.broadcast_to(x, (spec.items, *x.shape)) if config.shared else x
        both = _products(own.reshape(spec.items, -1, spec.width), experts, weight)
        inner = reference._activate(both[..., 0, :], both[..., 1, :], spec.limit)
        return _arranged(spec, inner.reshape(-1, spec.inner).astype(jnp.bfloat16))

    rows = config.tokens * (1 if config.shared else spec.items)
    return run, _items(spec, rows, spec.width, (2, spec.inner))


def _down(spec: Spec, config: Any = None) -> tuple[Callable, tuple]:
    """inner [items * tokens, inner], experts, num_items, weight -> bfloat16 [items * tokens, width]."""
    config = config or _config(spec)

    def run(inner, experts, num_items, *leaves):
        rows, weight = _rows_of(spec, inner, leaves)
        weight = _weight(spec, weight)
        if launch := _launch():
            from pallas_kernels.moe import mosaic_gpu

            items = (experts, num_items, spec.items)
            options = (config, launch, spec.arranged, *_scale_of(spec, leaves))
            return mosaic_gpu.down(inner, weight, *items, *options)
        own = rows.reshape(spec.items, -1, spec.inner)
        made = _products(own, experts, weight, lambda columns: _arranged(spec, columns))
        return made.reshape(-1, spec.width).astype(jnp.bfloat16)

    return run, _items(spec, config.tokens * spec.items, spec.inner, (spec.width,))


_BUILD = dict(
    route=_route, plan=_plan, place=_place, sort=_sort, spread=_spread, gate_up=_gate_up, down=_down
)


def _logits(spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    logits = _made(jnp.float32, spec.rows, spec.experts)
    return (logits, _made(jnp.bfloat16, spec.experts)) if spec.bias else (logits,)


def _items(spec: Spec, rows: int, K: int, outputs: tuple[int, ...]) -> tuple:
    """Shapes of x [rows, K], experts, num_items, values[, scale][, bias] of [E, *outputs, K][, x_scale]."""
    scale = jax.eval_shape(quantize, _made(jnp.bfloat16, rows, K)).scale
    return (
        _made(_x_dtype(spec), rows, K),
        _made(jnp.int32, spec.items),
        _made(jnp.int32, 1),
        *weight_of(spec.form, spec.experts, *outputs, K),
        *([_made(jnp.bfloat16, spec.experts, *outputs)] if spec.bias else []),
        *([scale] if spec.activations == "fp8" else []),
    )


def _scale_of(spec: Spec, leaves: tuple) -> tuple:
    """The scale of x among the last arguments of gate_up or down, if it has one."""
    return leaves[-1:] if spec.activations == "fp8" else ()


def _weight(spec: Spec, leaves: tuple) -> ExpertWeights:
    values, *rest = leaves
    scale = None if spec.form == "bf16" else rest.pop(0)
    return ExpertWeights(values, scale, *rest)


def _route_by_definition(spec: Spec, logits, bias) -> tuple[jax.Array, jax.Array]:
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return reference.route(logits, spec.top_k, True)


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
