"""Compares `mosaic_norm_route` with the three kernels that it replaces, on a Hopper GPU: bits, then microseconds.

    PYTHONPATH=. timeout 150 python probe_norm_route.py [--rows 8 1 16] [--layers N] [--no-bits] [--no-times]

A layer of the timed program begins with the norm that adds the experts' results, as in a model: it reads weights and
slots of the layer before, so that layers depend on each other. Its own time is printed too. Each layer has its own
router weight, together more than level 2 of the cache (128 of 0.5 MB).
"""

import argparse
import functools
import statistics
import sys
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_gemm.api import linear
from pallas_kernels.moe import mosaic_norm_route, mosaic_plan
from pallas_kernels.moe.api import CHIPS, dispatch
from pallas_kernels.moe.mosaic_gpu import TuningConfig
from pallas_kernels.moe.worklist import most_items
from pallas_kernels.rms_norm import mosaic_gpu as norm

D, E, K, S, SEEDS = 2048, 128, 8, 4, 20
TURNS, CALLS = 9, 20
START = time.perf_counter()


def say(*words):
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, flush=True)  # noqa: T201


def how(R):
    config = TuningConfig.choose(R, E, K, hopper=True, quantized=False)
    cut = dict(tokens=config.tokens, shared=config.shared)
    return dict(top_k=K, normalize=True, items=most_items(R, E, K, **cut), **cut)


def three(h, parts, bias, scale, weight, router_bias, launch):
    added = norm.Added(parts, bias=bias)
    total, x = norm.add_rms_norm(h, added, scale, eps=1e-6, inner_eps=None, launch=launch)
    logits = linear(x, weight, out_dtype=jnp.float32, implementation="mosaic_gpu")
    return total, x, *mosaic_plan.route_and_plan(logits, router_bias, launch=launch, **how(len(h)))


def one(h, parts, bias, scale, weight, router_bias, launch):
    rule = how(len(h))
    given = h, parts, bias, scale, weight, router_bias
    return mosaic_norm_route.norm_and_route(*given, eps=1e-6, launch=launch, **rule)


def inputs(R, seed, biased):
    keys = jax.random.split(jax.random.key(seed), 6)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape)
    half = lambda x: x.astype(jnp.bfloat16)
    scale, weight = half(1 + 0.1 * normal(2, D)), half(normal(3, E, D) / D**0.5)
    biases = (half(normal(4, D)), half(normal(5, E))) if biased else (None, None)
    return half(normal(0, R, D)), normal(1, S, R, D), biases[0], scale, weight, biases[1]


def valid(results, R):
    """The entries that are specified, as bits."""
    total, x, weights, slots, experts, num_items = map(np.asarray, results)
    kept = dict(
        total=total, normed=x, weights=weights[:, :R], slots=slots[:, :R],
        experts=experts[: int(num_items[0])], num_items=num_items,
    )  # fmt: skip
    return {name: x.view(f"u{x.dtype.itemsize}") for name, x in kept.items()}


def compare_bits(launch) -> bool:
    """R = 8 first, alone: if it is wrong, the rest need not be waited for."""
    same = True
    for cases in ([(8, False)], [(1, False), (2, False), (9, True), (16, False)]):
        lowered = []
        for R, biased in cases:
            args = inputs(R, 0, biased)
            for f in (three, one):
                lowered.append(jax.jit(functools.partial(f, launch=launch)).lower(*args))
        runs = compiled(lowered)
        for i, (R, biased) in enumerate(cases):
            same &= are_same(R, biased, runs[2 * i : 2 * i + 2])
    return same


def compiled(lowered):
    with futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: one.compile(), lowered))


def are_same(R, biased, runs) -> bool:
    wrong = []
    make = jax.jit(functools.partial(inputs, R, biased=biased))
    for seed in range(SEEDS):
        args = make(seed)
        wanted, found = (valid(run(*args), R) for run in runs)
        for name, bits in wanted.items():
            if bits.shape != found[name].shape:
                wrong.append((seed, name, bits.shape, found[name].shape))
            elif not np.array_equal(bits, found[name]):
                wrong.append((seed, name, f"{(bits != found[name]).mean():.4f} differ"))
    say(f"bits R={R} biases={biased}:", wrong[:8] or f"equal in {SEEDS} seeds")
    return not wrong


def program(layer, launch):
    def run(_, h, weights, slots, buffer, parts, scale, router):
        x = h
        for weight in router:
            added = norm.Added(buffer, weights, slots)
            h, x = norm.add_rms_norm(h, added, scale, eps=1e-6, inner_eps=None, launch=launch)
            if layer is not None:
                h, x, weights, slots, *_ = layer(h, parts, None, scale, weight, None, launch)
        return h, x, weights, slots

    # Results overwrite donated arrays, so that the CUDA graph keeps its addresses.
    return jax.jit(run, donate_argnums=0, keep_unused=True)


def times(launch, R, layers):
    rule = how(R)
    h, parts, _, scale, *_ = inputs(R, 0, False)
    buffer = jax.random.normal(jax.random.key(7), (rule["items"] * rule["tokens"], D))
    make = jax.jit(lambda key: (jax.random.normal(key, (E, D)) / D**0.5).astype(jnp.bfloat16))
    router = [make(jax.random.key(i)) for i in range(layers)]
    first = one(h, parts, None, scale, router[0], None, launch)
    args = h, *first[2:4], buffer.astype(jnp.bfloat16), 0.1 * parts, scale, router
    named = {"three": three, "one": one, "link": None}
    states, spent = {}, {name: [] for name in named}
    lowered = []
    for name, layer in named.items():
        states[name] = tuple(map(jnp.copy, (h, h, *first[2:4])))
        lowered.append(program(layer, launch).lower(states[name], *args))
    runs = dict(zip(named, compiled(lowered), strict=True))

    def seconds(name, turns):
        start = time.perf_counter()
        for _ in range(turns):
            states[name] = runs[name](states[name], *args)
        jax.block_until_ready(states[name])
        return time.perf_counter() - start

    for name in named:
        seconds(name, 3)
    say(f"R={R}: compiled {layers} layers")
    for _ in range(TURNS):
        for name in named:
            spent[name].append(1e6 * seconds(name, CALLS) / CALLS / layers)
    ends = [[np.asarray(x)[..., :R] if i > 1 else np.asarray(x) for i, x in enumerate(states[n])]
            for n in ("three", "one")]  # fmt: skip
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(*ends, strict=True))
    for name, us in spent.items():
        say(
            f"R={R} {name}: us a layer min {min(us):.2f} median {statistics.median(us):.2f} max {max(us):.2f}"
        )
    net = {
        name: statistics.median(us) - statistics.median(spent["link"]) for name, us in spent.items()
    }
    say(
        f"R={R} without the linking norm: three {net['three']:.2f}, one {net['one']:.2f}, "
        f"gain {net['three'] - net['one']:.2f} us a layer; results after {layers} layers "
        f"{'equal' if equal else 'DIFFER'}"
    )
    return equal


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 1])
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-bits", action="store_true")
    options = parser.parse_args()
    launch = dispatch.resolve("moe", "mosaic_gpu", chips=CHIPS)
    say(jax.devices()[0].device_kind, jax.__version__)
    same = options.no_bits or compare_bits(launch)
    if not options.no_times:
        for R in options.rows:
            same &= times(launch, R, options.layers)
    say("all equal" if same else "NOT equal")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
