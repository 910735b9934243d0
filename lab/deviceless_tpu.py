"""Compiles a round and a prefill for a TPU that is not present: `python -m lab.deviceless_tpu`.

libtpu compiles for every chip that it knows, on any machine: `pip install -e '.[tpu]'`. The
compiled programs
show types, layouts and memory: whether caches are updated in place, whether a weight is copied, how
large temporaries are, and whether all of it fits into the chip's memory. Neither numbers nor speed
are checked: nothing runs. Weights and caches are shapes only.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lab import deviceless
from lab.deviceless_round import (
    Programs,
    Sizes,
    add_sizes,
    num_bytes,
    programs,
    round_operands,
)
from lab.specs.block_gemm import weight_of
from pallas_kernels import dispatch
from pallas_kernels.device import TPU7X, V5E, V6E
from pallas_kernels.moe.api import mixture
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights
from peagle_jax.engine.device import layouts

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
"""Chip -> libtpu's name of its smallest host. One device of the host is compiled for."""
CHIPS = {"v5e": V5E, "v6e": V6E, "7x": TPU7X}
PROGRAMS = ("round", "prefill", "experts")
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to a cloud's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # with the next one: no warnings; any chip works
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes compile at the same time
}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_ARRAY = r"(\w+)\[([\d,]*)\](\{[^}]*\})?"
_COPY = re.compile(rf"= {_ARRAY} copy\(|= \({_ARRAY}, [^=]*\) copy-start\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Properties of one compiled program.

    Attributes:
      chip: key of `CHIPS`.
      program: "round", "prefill", or the experts of a layer.
      argument_bytes: bytes of weights, state and plan.
      temporary_bytes: bytes of temporary buffers in the device's memory.
      cache_bytes, aliased_bytes: bytes of all caches, and of donated arguments that become results.
      largest_copy: bytes of the largest array of less than 32 bits a number, as weights and caches
        are, that is copied within the device's memory; 0 if none.
      smallest_matrix: bytes of the smallest weight matrix or cache.
      seconds: tracing, lowering and compiling.
    """

    chip: str
    program: str
    argument_bytes: int
    temporary_bytes: int
    cache_bytes: int
    aliased_bytes: int
    largest_copy: int
    smallest_matrix: int
    seconds: float


def missing() -> str | None:
    """The package that compiling needs and this machine lacks; None if there is none."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install -e '.[tpu]'"
    return None


def prepare() -> None:
    """Sets up this process to compile for no device; before jax is used."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


@contextlib.contextmanager
def target(chip: str) -> Iterator[jax.sharding.Mesh]:
    """Context with a mesh of one such device, for which everything inside is traced."""
    from jax.experimental import topologies

    host = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = jax.sharding.Mesh(np.array(host.devices[:1]), ("tpu",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), dispatch.assume(CHIPS[chip]):
        yield mesh


EXPERTS = {
    "qwen3-30b-fp8": ("fp8", (128, 768, 2048), 8),
    "qwen3-30b-bf16": ("bf16", (128, 768, 2048), 8),
    "gpt-oss-20b-mxfp4": ("mxfp4", (32, 2880, 2880), 4),
}
"""Model -> format, (experts, inner width, width) and experts a row of a layer."""


def compile_experts(name: str, rows: int, chip: str) -> Program:
    """Routing and experts of one layer of `EXPERTS`, compiled for `chip`.

    `smallest_matrix` is that of the projections of all experts.
    """
    form, (E, F, D), top_k = EXPERTS[name]

    def experts(*shape: int) -> ExpertWeights:
        values, *scale = weight_of(form, *shape)
        return ExpertWeights(values, scale[0] if scale else None)

    def run(x, logits, gate_up, down):
        chosen = Choice(top_k, normalize=True), Experts(gate_up, down)
        return mixture(x, logits, *chosen, implementation="mosaic_tpu")

    x = jax.ShapeDtypeStruct((rows, D), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((rows, E), jnp.float32)
    weights = experts(E, 2, F, D), experts(E, D, F)
    start = time.perf_counter()
    with target(chip) as mesh:
        compiled = deviceless.compile_on(mesh, run, x, logits, *weights)
    smallest = min(num_bytes(one.values) for one in weights)
    return _program(chip, f"experts of {name}, {rows} rows", compiled, [], smallest, start)


def compile_programs(
    names: Sequence[str], chip: str, made: Programs, operands: tuple
) -> Iterator[Program]:
    """The round, and the prefill if `names` has it, compiled for `chip` as the engine does.

    `operands` are those of the round. The layouts of the weights are those that the round chose
    (`peagle_jax.engine.device.layouts`).

    Raises:
      jax.errors.JaxRuntimeError: libtpu refuses it, for example because it does not fit into
      memory.
    """
    with target(chip) as mesh:
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        start = time.perf_counter()
        lowered = layouts.lower_free(made.round, *operands, donate=(1,), sharding=place)
        compiled = lowered.compile()
        yield _program(chip, "round", compiled, made.caches, made.smallest_matrix, start)
        if "prefill" not in names:
            return
        start = time.perf_counter()
        formats = compiled.input_formats[0][0]
        put = lambda x, format: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=format)
        weights = [put(x, format) for x, format in zip(made.weights, formats, strict=True)]
        others = (made.state, *made.prefill_plan, None)
        others = jax.tree.map(lambda x: put(x, place), others)
        compiled = jax.jit(made.prefill, donate_argnums=1).lower(weights, *others).compile()
        yield _program(chip, "prefill", compiled, made.caches, made.smallest_matrix, start)


def _program(
    chip: str, name: str, compiled, caches: list, smallest_matrix: int, start: float
) -> Program:
    """Sizes and copies of a compiled program; its compilation began at `start`."""
    memory = compiled.memory_analysis()
    return Program(
        chip=chip,
        program=name,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        cache_bytes=sum(map(num_bytes, caches)),
        aliased_bytes=memory.alias_size_in_bytes,
        largest_copy=largest_narrow(copies(compiled.as_text())),
        smallest_matrix=smallest_matrix,
        seconds=round(time.perf_counter() - start, 1),
    )


def copies(hlo: str) -> list[tuple[int, str]]:
    """(bytes, dtype and shape) of each array that a program copies, the largest first.

    A copy inside a fusion is a change of layout on the way through the chip, and a copy to VMEM
    (memory space 1) a prefetch: neither writes to the device's memory.
    """
    fused = set(_CALLED.findall(hlo))
    found = []
    for name, body in _COMPUTATION.findall(hlo):
        if name in fused:
            continue
        for groups in _COPY.findall(body):
            dtype, shape, layout = groups[:3] if groups[0] else groups[3:]
            if "S(1)" in layout:
                continue
            bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
            size = math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
            found.append((size, f"{dtype}[{shape}]"))
    return sorted(found, reverse=True)


def _compile(args) -> Iterator[Program]:
    """The programs that the options name."""
    names = args.program or ("round", "prefill")
    sizes = Sizes.of(vars(args))
    made = programs(sizes) if {"round", "prefill"} & set(names) else None
    for chip in args.chip or CHIPS:
        if made is not None:
            yield from compile_programs(names, chip, made, round_operands(made, sizes))
        for model in EXPERTS if "experts" in names else ():
            for rows in (16, 64):  # all items share the rows; each item has rows of its own
                yield compile_experts(model, rows, chip)


def largest_narrow(found: Sequence[tuple[int, str]]) -> int:
    """Bytes of the largest of the arrays of `copies` with less than 32 bits a number; logits have
    32."""
    return max(
        (size for size, name in found if re.match(r"bf16|f8|f4|[su][248]\[", name)), default=0
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 if nothing can be compiled here."""
    parser = argparse.ArgumentParser(prog="python -m lab.deviceless_tpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--chip", choices=CHIPS, action="append", help="default: all")
    parser.add_argument(
        "--program", choices=PROGRAMS, action="append", help="default: round and prefill"
    )
    add_sizes(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if lacking := missing():
        print(f"{parser.prog}: {lacking}", file=sys.stderr)
        return 2
    prepare()
    found = []
    for one in _compile(args):
        found.append(dataclasses.asdict(one))
        print(*(f"{key}: {value}" for key, value in found[-1].items()), sep=", ", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
