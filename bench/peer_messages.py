"""Messages between GPUs beside the library's all-gathers, bits and times: `python -m bench.peer_messages`.

Sums of partial products, weighted sums of experts and words of any bits travel both ways and are compared. Then a chain of
messages is timed, and repeated while a thread compiles and loads other programs. Exit code 1 if a bit differs.

Sums are compared as they arrive. If they were scaled or added first, XLA could contract both operations into one and round
once, in one of the two programs only.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bench.command import positive
from pallas_kernels.moe.api import Mixture
from peagle_jax.devices import Devices, met
from peagle_jax.parallel import partition
from peagle_jax.parallel.partition import AXIS, Messages

SPEC = PartitionSpec(AXIS)
CHAIN = 96
"""Messages of a program that is timed, about as many as in a round of 48 layers."""

Operation = Callable[..., jax.Array]
"""What each device computes from its own arrays, with messages or without."""


class Wire:
    """Both ways to exchange arrays between `count` devices."""

    def __init__(self, count: int):
        self.count = count
        self._devices = Devices(count, peers=True)
        self._links = self._devices.links()

    def put(self, array) -> jax.Array:
        """An array [n, ...] with one part on each device."""
        return jax.device_put(array, self._devices.sharding(SPEC))

    def by_messages(self, operation: Operation, args: tuple[jax.Array, ...]) -> Callable:
        """A function that runs the operation once, compiled."""
        program = self._program(operation, args, True)

        def call():
            result, self._links = program(args, self._links)
            return result

        return call

    def by_library(self, operation: Operation, args: tuple[jax.Array, ...]) -> Callable:
        program = self._program(operation, args, False)
        return lambda: program(args, self._links)[0]

    def _program(self, operation: Operation, args, has_messages: bool) -> Callable:
        def local(args, links):
            messages = Messages(met(links[0])) if has_messages else None
            with partition.over(self.count, messages):
                result = operation(*(arg[0] for arg in args))
            return result[None], links if messages is None else messages.links[None]

        mapped = jax.shard_map(
            local, mesh=self._devices.mesh, in_specs=(SPEC, SPEC), out_specs=(SPEC, SPEC), check_vma=False
        )  # fmt: skip
        donated = (1,) if has_messages else ()
        return jax.jit(mapped, donate_argnums=donated).lower(args, self._links).compile()


def cases(wire: Wire, rows: Sequence[int], columns: int) -> Iterator[tuple[str, Operation, tuple]]:
    """(name, operation, arguments) to compare."""
    rng, n = np.random.default_rng(0), wire.count
    normal = lambda *shape: rng.normal(size=(n, *shape)).astype(np.float32)
    for R in rows:
        for parts in (1, 2, 4):
            for dtype in (jnp.bfloat16, jnp.float32):
                sums = lambda x, dtype=dtype: partition.parts_of_all(x, dtype)
                name = f"{parts} parts of {R} rows in {jnp.dtype(dtype)}"
                yield name, sums, (wire.put(normal(parts, R, columns)),)
        for top_k in (4, 8):
            added = lambda *arrays, R=R: partition.mixtures_of_all(Mixture(*arrays), R)
            arrays = tuple(map(wire.put, random_mixture(rng, n, R, top_k, columns)))
            yield f"{R} rows of {top_k} experts", added, arrays
        words = rng.integers(-2, 2, size=(n, 2, R)).astype(np.int32)
        yield f"words of {R} rows", partition.gathered, (wire.put(words),)


def random_mixture(rng, n: int, R: int, top_k: int, columns: int) -> tuple:
    """Values, weights and rows of `Mixture` for n devices. Half of the weights are 0, and their value is NaN."""
    values = rng.normal(size=(n, R * top_k + 1, columns)).astype(np.float32)
    values[:, -1] = np.nan
    rows = np.stack([rng.permutation(R * top_k).reshape(top_k, R) for _ in range(n)])
    weights = rng.random(rows.shape).astype(np.float32)
    is_left_out = rng.random(rows.shape) < 0.5
    weights[is_left_out], rows[is_left_out] = 0, R * top_k
    return jnp.asarray(values, jnp.bfloat16), weights, rows.astype(np.int32)


def differing(found: jax.Array, wanted: jax.Array) -> int:
    """Number of elements with other bits."""
    bits = lambda x: np.asarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))
    return int((bits(found) != bits(wanted)).sum())


def chain(x: jax.Array) -> jax.Array:
    """`CHAIN` messages, each of which waits for the one before; x float32 [1, R, D]."""
    for _ in range(CHAIN):
        sums = partition.parts_of_all(x, jnp.bfloat16)
        x = x.at[0, 0, 0].add(sums[0, 0, 0].astype(jnp.float32))
    return x


def microseconds(call: Callable, calls: int) -> float:
    """Time of one message of `chain`, with the small operation between two messages."""
    jax.block_until_ready([call(), call()])
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls / CHAIN * 1e6


def beside_compilation(call: Callable, seconds: float) -> tuple[int, int, int]:
    """Calls, calls with another result than the first, and programs that a thread compiled and ran meanwhile."""
    wanted, ends, compiled = call(), threading.Event(), []

    def compile_others():
        while not ends.is_set():
            program = jax.jit(lambda x, y: jnp.sin(x @ x + y).sum(), static_argnums=1)
            program(np.ones((256, 256), np.float32), float(len(compiled))).block_until_ready()
            compiled.append(program)

    thread = threading.Thread(target=compile_others)
    thread.start()
    try:
        calls, wrong, start = 0, 0, time.perf_counter()
        while calls < 2 or time.perf_counter() - start < seconds:
            wrong += differing(call(), wanted) > 0
            calls += 1
    finally:
        ends.set()
        thread.join()
    return calls, wrong, len(compiled)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer_messages", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--tensor-parallel", type=positive, default=2, metavar="N", help="devices (default: 2)")
    add("--rows", type=positive, nargs="+", default=[1, 8, 56, 64, 256], metavar="R")
    add("--columns", type=positive, default=2048, metavar="D", help="default: 2048")
    add("--calls", type=positive, default=20, help="timed calls of a chain (default: 20)")
    add("--seconds", type=float, default=10, help="with a thread that compiles (default: 10)")
    args = parser.parse_args(argv)
    wire, wrong = Wire(args.tensor_parallel), 0
    for name, operation, arrays in cases(wire, args.rows, args.columns):
        wanted, send = wire.by_library(operation, arrays)(), wire.by_messages(operation, arrays)
        count = sum(differing(send(), wanted) for _ in range(3))  # both slots of a mailbox
        wrong += count
        print(f"{name}: {f'{count} elements differ' if count else 'equal'}", flush=True)
    for R in args.rows:
        x = wire.put(np.ones((wire.count, 1, R, args.columns), np.float32))
        ways = {"messages": wire.by_messages, "library": wire.by_library}
        times = {name: microseconds(way(chain, (x,)), args.calls) for name, way in ways.items()}
        print(f"{R} rows, us: " + ", ".join(f"{k} {v:.1f}" for k, v in times.items()), flush=True)
    calls, bad, compiled = beside_compilation(wire.by_messages(chain, (x,)), args.seconds)
    print(f"beside {compiled} compilations: {calls * CHAIN:,} messages, {bad} calls differ")
    return 1 if wrong or bad else 0


if __name__ == "__main__":
    sys.exit(main())
