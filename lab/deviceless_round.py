"""Compiles a whole decode round for a GPU that is not present: `python -m lab.deviceless_round`.

Even with fast kernels a round is slow if it is split into several CUDA graphs, or if XLA copies a
weight or the cache before a kernel. The compiled program shows both. Weights and caches are shapes
only, so a model of any size compiles on any machine.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from bench.command import Options, add_options, option
from bench.presets import preset
from bench.random_weights import random_head, random_target
from lab import deviceless, printed_code
from pallas_kernels import dispatch
from peagle_jax.config import EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.compiler_options import compiler_options
from peagle_jax.engine.host.calls import DecodeCall, RoundShape, idle_prefill
from peagle_jax.engine.host.prefill_shapes import full_shape
from peagle_jax.method import step
from peagle_jax.method.drafter import make_drafter
from peagle_jax.method.plan import DecodePlan, PrefillPlan, greedy_only, mask_words
from peagle_jax.method.repeated_rounds import speculative_rounds
from peagle_jax.models.quantized_activations import with_activations
from peagle_jax.models.weight_order import order_weights
from peagle_jax.parallel.mailboxes import DEFAULT_CHIPS

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.MULTILINE)
_COLLECTIVE = re.compile(r"k(All|Collective|ReduceScatter|Send|Recv)\w*")
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* (copy|copy-start)\(")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Round:
    """Properties of the compiled program of one round.

    Attributes:
      graphs: number of command buffers (CUDA graphs) at the top level.
      outside: number of launches outside of the graphs, by kind.
      collectives: number of transfers between devices, by kind, also within graphs and branches.
      kernels: number of nodes in the graphs; a conditional counts as one.
      mosaic: number of this project's kernels, by name.
      spills: register spills in bytes of the worst of these kernels.
      largest_copy: bytes of the largest array that is copied, 0 if none.
      smallest_matrix: bytes of the smallest weight matrix or cache.
      operands: arrays that a call takes.
      cache_bytes, aliased_bytes: bytes of all caches, and of donated arguments that become results.
      temporary_bytes: bytes of temporary buffers.
      seconds: tracing, lowering and compiling.
    """

    graphs: int
    outside: dict[str, int]
    collectives: dict[str, int]
    kernels: int
    mosaic: dict[str, int]
    spills: int
    largest_copy: int
    smallest_matrix: int
    operands: int
    cache_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sizes(Options):
    """The shapes to compile for.

    Args:
      preset: as for decode-step
      layers: layers of the target
      head_layers: layers of the head
      k: drafts per round; 0: plain decoding
      rounds_per_call: rounds in a call, for greedy requests if above 1
      selector: rank of the head's selector; 0: none
      concurrency: sequences
      max_model_len: prompt and output
      greedy: the round of greedy requests, which has no branches
      tensor_parallel: devices
      gather: how devices exchange arrays
      kv_cache_dtype: auto: bfloat16
      activations: of fp8 weights
    """

    preset: str = "qwen3-coder-30b-a3b-fp8"
    layers: int = 2
    head_layers: int = 1
    k: int = option(3, type=int)
    rounds_per_call: int = 1
    selector: int = option(0, type=int)
    concurrency: int = 2
    max_model_len: int = 4096
    greedy: bool = False
    tensor_parallel: int = 1
    gather: Literal["auto", "library", "peers"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    activations: Literal["bf16", "fp8"] = "bf16"


class Programs(NamedTuple):
    """The programs of an engine to compile, with shapes instead of arrays.

    Attributes:
      config: sizes of the engine.
      round, prefill: functions of (weights, state, plan, mask, previous) that return the next state
        and an output; the output before is not read.
      weights: leaves of target and drafter.
      state: `step.State`, which the programs are to consume.
      round_plan, prefill_plan: idle plans, each with its mask.
    """

    config: EngineConfig
    round: Callable
    prefill: Callable
    weights: list
    state: step.State
    round_plan: tuple[DecodePlan, np.ndarray]
    prefill_plan: tuple[PrefillPlan, np.ndarray]

    @property
    def caches(self) -> list:
        """Shapes of all keys and values."""
        return jax.tree.leaves((self.state.target_cache, self.state.drafter_cache))

    @property
    def smallest_matrix(self) -> int:
        """Bytes of the smallest weight matrix or cache."""
        matrices = [
            x for x in self.weights if len(x.shape) > 1 and jax.numpy.result_type(x).itemsize < 4
        ]
        return min(map(num_bytes, [*matrices, *self.caches]))


def num_bytes(x) -> int:
    """Bytes of an array, given its shape and dtype."""
    return math.prod(x.shape) * x.dtype.itemsize


def programs(sizes: Sizes, mesh=None) -> Programs:
    """The programs of a preset's first layers with its P-EAGLE head, as the engine compiles them.

    Args:
      mesh: the devices, of more than one.
    """
    chosen = preset(sizes.preset, sizes.layers)
    config = EngineConfig(
        num_draft=sizes.k,
        max_num_seqs=sizes.concurrency,
        max_model_len=sizes.max_model_len,
        dtype="bfloat16",
        kv_cache_dtype=sizes.kv_cache_dtype,
        activations=sizes.activations,
        tensor_parallel=sizes.tensor_parallel,
        gather=sizes.gather,
    )
    by_default = dispatch.device().sm in DEFAULT_CHIPS
    peers = sizes.gather == "peers" or (sizes.gather == "auto" and by_default)
    devices = Devices(sizes.tensor_parallel, peers=peers, mesh=mesh)
    head_config, drafter, taps = None, None, ()
    target = devices.placed(
        jax.eval_shape(lambda: random_target(chosen.target, chosen.format, dtype="bfloat16"))
    )
    if sizes.k:  # K = 0 is plain decoding
        shape = dict(num_layers=sizes.head_layers, selector_rank=sizes.selector)
        head_config = dataclasses.replace(chosen.head("peagle"), **shape)
        head = jax.eval_shape(lambda: random_head(head_config, dtype="bfloat16"))
        head = devices.placed(head)
        make = lambda head, target: make_drafter(head, sizes.k, "argmax", target=target)
        drafter = jax.eval_shape(make, head, target if mesh is None else None)
        drafter = dataclasses.replace(drafter, head=head)  # `eval_shape` drops the shardings
        taps = head_config.taps or chosen.target.default_taps
    state = devices.state_shape(chosen.target, head_config, config)
    order_weights(target, config.activations)
    target = with_activations(target, config)
    weights, structure = jax.tree.flatten((target, drafter))
    weights = devices.take_weights(weights)

    models = lambda weights: jax.tree.unflatten(structure, devices.leaves(weights))

    @devices.program
    def decode_round(weights, state, plan, mask, previous):
        if sizes.rounds_per_call > 1:
            light = dataclasses.replace(state, params=greedy_only(state.params), controls=None)
            plan = plan._replace(constrained=None, forced=None, newest=None)
            own, run = (
                functools.partial(models, weights),
                functools.partial(step.speculative_step, taps=taps),
            )
            light, output = speculative_rounds(own, run, light, plan, sizes.rounds_per_call)
            kept = dict(params=state.params, controls=state.controls)
            return dataclasses.replace(light, **kept), output
        return step.speculative_step(*models(weights), state, plan, mask, taps=taps)

    @devices.program
    def prefill(weights, state, plan, mask, previous):
        return step.prefill(*models(weights), state, plan, mask, taps=taps)

    words = mask_words(chosen.target.vocab_size)
    mask = lambda rows, T: np.zeros((rows, T, words), np.int32)

    return Programs(
        config,
        decode_round,
        prefill,
        weights,
        state,
        (
            DecodeCall.build([], RoundShape(sizes.concurrency, sizes.k), config).plan,
            mask(sizes.concurrency, sizes.k + 1),
        ),
        (idle_prefill(config, full_shape(config)), mask(config.prefill_rows, 1)),
    )


def round_operands(made: Programs, sizes: Sizes) -> tuple:
    """Arguments of `made.round`, of the round of greedy requests if `sizes` says so."""
    state, (plan, mask) = made.state, made.round_plan
    if sizes.greedy:
        state = dataclasses.replace(state, params=greedy_only(state.params), controls=None)
        plan, mask = plan._replace(constrained=None, forced=None, newest=None), None
    return made.weights, state, plan, mask, None


def compile_round(sizes: Sizes, mesh, dump: Path) -> Round:
    """The round of `programs(sizes)`, compiled for the GPU of `mesh`."""
    made = programs(sizes, mesh if sizes.tensor_parallel > 1 else None)
    start = time.perf_counter()
    operands = round_operands(made, sizes)
    with printed_code.kept(dump):
        compiled = deviceless.compile_on(
            mesh, made.round, *operands, donate_argnums=1, compiler_options=compiler_options()
        )
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    (thunks,) = dump.glob("*decode_round*.thunk_sequence_after_thunk_passes.txt")
    ours = [printed_code.read_log(path) for path in dump.glob("*.ptxas")]
    return Round(
        **read_thunks(thunks.read_text(encoding="utf-8")),
        mosaic=dict(collections.Counter(name for name, _, _ in ours)),
        spills=max((spills for _, _, spills in ours), default=0),
        largest_copy=largest_copy(compiled.as_text()),
        smallest_matrix=made.smallest_matrix,
        operands=len(jax.tree.leaves(operands)),
        cache_bytes=sum(map(num_bytes, made.caches)),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        seconds=round(seconds, 1),
    )


def read_thunks(text: str) -> dict:
    """`graphs`, `outside`, `collectives` and `kernels` of XLA's list of what it launches; parts are
    indented."""
    graphs, kernels, outside, inside = 0, 0, {}, False
    kinds = [kind for _, kind in _THUNK.findall(text) if _COLLECTIVE.match(kind)]
    inner = min((len(indent) for indent, _ in _THUNK.findall(text) if indent), default=0)
    for indent, kind in _THUNK.findall(text):
        if not indent:
            inside = kind == "kCommandBuffer"
            graphs += inside
            if not inside:
                outside[kind] = outside.get(kind, 0) + 1
        elif inside and len(indent) == inner:
            kernels += 1
    collectives = dict(collections.Counter(kinds))
    return dict(graphs=graphs, outside=outside, collectives=collectives, kernels=kernels)


def largest_copy(hlo: str) -> int:
    """Bytes of the largest array that an HLO module copies."""
    sizes = [0]
    for dtype, shape, _ in _COPY.findall(hlo):
        bits = int(_BITS.search(dtype)[0]) if dtype != "pred" else 8
        sizes.append(math.prod(map(int, filter(None, shape.split(",")))) * bits // 8)
    return max(sizes)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Sizes`."""
    add_options(parser, Sizes)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 if nothing can be compiled here."""
    parser = argparse.ArgumentParser(prog="python -m lab.deviceless_round", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--chip", choices=deviceless.CHIPS, default="h200", help="default: h200")
    add_sizes(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep what XLA and Mosaic dump")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if lacking := deviceless.missing():
        print(f"{parser.prog}: {lacking}", file=sys.stderr)
        return 2
    if args.dump and args.dump.is_dir() and any(args.dump.iterdir()):
        parser.error(f"{args.dump} is not empty")
    with contextlib.ExitStack() as stack:
        dump = args.dump or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dump.mkdir(parents=True, exist_ok=True)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        deviceless.prepare()
        mesh = stack.enter_context(deviceless.target(args.chip, args.tensor_parallel))
        made = dataclasses.asdict(compile_round(Sizes.of(vars(args)), mesh, dump))
    if args.json:
        args.json.write_text(json.dumps(made))
    print(*(f"{name}: {value}" for name, value in made.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
