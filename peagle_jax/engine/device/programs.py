"""The compiled device programs of an engine: one for prefill, one per `RoundShape` for rounds, one
that writes the sampling controls of a request, and one that copies rings of windowed layers.

Each program is compiled ahead of time for fixed shapes. After `warm_up` no call compiles anything.

On a GPU one call is one CUDA graph of hundreds of kernels. If the address of a buffer changes, the
driver must update every node of the graph, 1 to 4 microseconds each. So all buffers of a call keep
their addresses: the plan is copied into resident arrays, the output overwrites the donated output
of the call before, and the host reads a copy. (`memory.carve_holes` fixes the address of XLA's
temporary buffer.)

A batch of greedy requests without logprobs and controls has a program of its own, without branches:
conditional nodes make the launch of a graph slow.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from pallas_kernels import dispatch
from peagle_jax.config import DrafterConfig, EngineConfig, TargetConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device import layouts
from peagle_jax.engine.device.compilation import Recipe
from peagle_jax.engine.device.compiler_options import compiler_options
from peagle_jax.engine.device.functions import make_functions
from peagle_jax.engine.device.memory import carve_holes
from peagle_jax.engine.device.output_shapes import spec_of
from peagle_jax.engine.device.program import (
    Call,
    CopyRings,
    GreedyRound,
    Prefill,
    Program,
    Round,
    WriteControls,
)
from peagle_jax.engine.device.round_shapes import greedy_shapes, round_shapes
from peagle_jax.engine.device.stored_programs import StoredPrograms
from peagle_jax.engine.device.stored_times import StoredTimes
from peagle_jax.engine.device.transfer import Resident, Result
from peagle_jax.engine.host.calls import RoundShape, timed_plan
from peagle_jax.engine.host.prefill_shapes import PrefillShape, full_shape, prefill_shapes
from peagle_jax.method import step
from peagle_jax.method.plan import ControlsPlan, DecodePlan, PrefillPlan
from peagle_jax.models.quantized_activations import with_activations

AT_ONCE = max(4, min(8, (os.cpu_count() or 1) // 2))
"""Programs that `Programs.warm_up` loads or compiles at the same time."""

_FIRST_CALLS = 2


class Programs:
    """Compiles and caches the programs. Weights are passed as flat leaves: the cheapest
    dispatch."""

    def __init__(
        self,
        target,
        drafter,
        config: EngineConfig,
        *,
        taps,
        accept: step.AcceptRule,
        devices: Devices | None = None,
    ):
        self._config, platform = config, dispatch.platform()
        self.shapes = round_shapes(config, platform)
        """Shapes of the rounds that `warm_up` compiles without a choice of its own."""
        rounds, count = tuple(map(Round, self.shapes)), len(config.batch_buckets)
        self._greedy = tuple(map(GreedyRound, greedy_shapes(config, platform)))
        self.rounds_of_any: tuple[Call, ...] = (
            *rounds[:count],
            *self._greedy,
            *rounds[count:],
        )
        """All rounds, in the order in which they compile."""
        served = {one.shape for one in self._greedy}
        self.rounds_of_greedy = tuple(
            one for one in self.rounds_of_any if one in self._greedy or one.shape not in served
        )
        """Those of `rounds_of_any` that greedy requests without logprobs and controls need."""
        full = full_shape(config)
        self.small_prefills: tuple[Call, ...] = tuple(
            Prefill(shape) for shape in prefill_shapes(config) if shape != full
        )
        self.full_prefills = tuple(
            Prefill(full, scores) for scores in (False, True)[: 1 + config.prompt_logprobs]
        )
        """The largest prefill, and with `prompt_logprobs` the one that scores prompts."""
        self.copies = WriteControls(), *[CopyRings()] * bool(config.saved_rings)
        """Programs that only move data: the controls of a request, and the rings of a beginning."""
        devices = devices or Devices()
        target = with_activations(target, config)
        weights, structure = jax.tree.flatten((target, drafter))
        self._shapes = jax.tree.unflatten(structure, map(spec_of, weights))
        self._taps, self._accept = taps, accept
        self._structure = structure
        self._devices, self._weights = devices, devices.take_weights(weights)
        self.stored_times = StoredTimes(self._weights, structure, config)
        rules = dict(taps=taps, max_logprobs=config.max_logprobs, accept=accept)
        places = [dispatch.default_device()] if devices.mesh is None else [*devices.mesh.devices]
        self._stored = StoredPrograms(structure, config, places, rules)
        self._functions = make_functions(structure, config, devices, taps, accept)
        self._compiled: dict[Program, Callable] = {}
        self._resident: dict[Call, Resident] = {}
        self._lock, self._weights_lock = threading.Lock(), threading.Lock()
        self._layouts_are_free = devices.count == 1 and platform in layouts.PLATFORMS
        self._between_holes = carve_holes(devices.count) if platform == "cuda" else []

    @property
    def models(self) -> tuple:
        """Target and drafter with the present weights."""
        return jax.tree.unflatten(self._structure, self._devices.leaves(self._weights))

    @property
    def model_shapes(self) -> tuple:
        """`models` with shapes in place of the weights."""
        return self._shapes

    def replace_weights(self, take: list[Callable | None]) -> None:
        """Gives the programs other weights, of the same shapes: nothing compiles.

        A thread that reads the weights to compile for them is waited for.

        Args:
          take: as of `Devices.replace_weights`, for the leaves of `models`.
        """

        def moved(own: Callable) -> Callable:
            return lambda before: layouts.moved_as(own(before), before)

        with self._weights_lock:
            self._devices.replace_weights(self._weights, [own and moved(own) for own in take])

    def init_state(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        links: jax.Array | None = None,
    ) -> step.State:
        """The state of an engine. That of weights which are shapes has shapes only: nothing can run
        on it.

        Args:
          links: as of `Devices.init_state`.
        """
        if isinstance(self._weights[0], jax.ShapeDtypeStruct):
            return self._devices.state_shape(target, drafter, self._config)
        return self._devices.init_state(target, drafter, self._config, links)

    def released(self, state: step.State) -> step.State:
        """The shapes of a state whose arrays are deleted, all but `links`."""
        jax.block_until_ready(state)
        for leaf in jax.tree.leaves(replace(state, links=None)):
            leaf.delete()
        return replace(jax.tree.map(spec_of, state), links=state.links)

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @property
    def num_ready(self) -> int:
        """Compiled programs whose buffers exist."""
        return len(self._resident)

    def prefill(
        self,
        state: step.State,
        plan: PrefillPlan,
        mask: np.ndarray | None = None,
        scores: bool = False,
    ):
        """Dispatches one prefill call; `state` is consumed. Returns the next state and a
        `Result`."""
        shape = full_shape(self._config) if scores else PrefillShape(*plan.tokens.shape)
        return self._dispatch(Prefill(shape, scores), state, plan, mask)

    def round(
        self,
        state: step.State,
        plan: DecodePlan,
        shape: RoundShape,
        mask: np.ndarray | None = None,
        is_greedy: bool = False,
    ):
        """Dispatches one round; `state` is consumed. Returns the next state and a `Result`.

        Args:
          is_greedy: whether all requests are greedy, want no logprobs and have no controls or
            masks.
        """
        greedy = GreedyRound(shape)
        chosen = greedy if is_greedy and greedy in self._resident else Round(shape)
        return self._dispatch(chosen, state, plan, mask)

    def control(self, state: step.State, plan: ControlsPlan) -> step.State:
        """Dispatches the write of a request's sampling controls; `state` is consumed."""
        write = WriteControls()
        return write.run(self._ready(write, state), state, plan)

    def copy_rings(self, state: step.State, source: int, target: int) -> step.State:
        """Dispatches the copy of all rings of one row to another; `state` is consumed."""
        copy = CopyRings()
        return copy.run(self._ready(copy, state), state, source, target)

    def _dispatch(
        self,
        call: Call,
        state: step.State,
        plan: PrefillPlan | DecodePlan,
        mask: np.ndarray | None,
    ) -> tuple[step.State, Result]:
        if call not in self._resident:
            self._prepare_call(call, state)
        resident = self._resident[call]
        resident.upload(plan, mask)
        state = call.run(self._compiled[call], self._weights, state, resident)
        return state, Result(resident.bits, resident.layout)

    def _ready(self, one: Program, state: step.State) -> Callable:
        """The program, compiled if it is not yet."""
        if one not in self._compiled:
            made = self._make(one, state)
            with self._lock:
                self._compiled.setdefault(one, made)
        return self._compiled[one]

    def _prepare_call(self, call: Call, state: step.State) -> None:
        """Compiles a program, and those that copy its plan and mask in."""
        self._ready(call, state)
        resident = call.resident(self._functions, state)
        resident.compile()
        # A program that two threads prepare keeps its first buffers: a plan may lie there.
        self._resident.setdefault(call, resident)

    def _make(self, one: Program, state: step.State) -> Callable:
        """The program, from disk or compiled onto it; `state` may be one of shapes."""
        operands = self._operands(one, state)
        lower = one.lower(self._functions, state)
        results = one.results(one.operands(self._functions, state))
        return self._stored.program(repr(one), operands, results, lower, compiler_options())

    def _operands(self, one: Program, state: step.State) -> tuple:
        """Shapes of all that a program takes."""
        operands = one.operands(self._functions, state)
        if one in self.copies:
            return operands
        with self._weights_lock:
            if self._layouts_are_free:
                self._move_weights(state)
            weights = jax.tree.map(spec_of, layouts.shapes(self._weights))
        return weights, *operands

    def _move_weights(self, state: step.State) -> None:
        """Moves the weights into the layouts of the first round, for which all others compile."""
        first = self.rounds_of_any[0]
        others = first.operands(self._functions, state)
        layouts.move(self._weights, self._functions.round, first.shape, others)
        self._layouts_are_free = False

    @property
    def folder(self) -> Path | None:
        """Where programs are to be kept on disk."""
        return self._config.programs_folder

    def file_of(self, one: Program, state: step.State) -> Path | None:
        """Where a program is kept on disk; None if programs are not kept. `state` may be one of
        shapes."""
        return self._stored.path_of(repr(one), self._operands(one, state), compiler_options())

    def store(self, one: Program, state: step.State) -> None:
        """Compiles a program onto disk only, and those of its transfers into jax's own cache.
        `state` may be one of shapes, and the weights too."""
        self._make(one, state)
        if one not in self.copies and jax.config.jax_compilation_cache_dir is not None:
            one.resident(self._functions, state).compile()

    def recipe(self, target: TargetConfig, drafter: DrafterConfig | None) -> Recipe:
        """What another process needs to compile these programs.

        Args:
          target, drafter: as of `init_state`.
        """
        return Recipe(
            *self._shapes,
            target_config=target,
            drafter_config=drafter,
            config=self._config,
            taps=self._taps,
            accept=self._accept,
        )

    def not_on_disk(self, some: Sequence[Program], state: step.State) -> tuple[Program, ...] | None:
        """Those of `some` that are neither compiled nor on disk; None if programs are not kept on
        disk."""
        files = {one: self.file_of(one, state) for one in some if one not in self._compiled}
        if None in files.values():
            return None
        return tuple(one for one, file in files.items() if not file.exists())

    @property
    def compiled(self) -> tuple[RoundShape, ...]:
        """Shapes whose rounds are compiled, ascending; for greedy requests at least."""
        ready = {one.shape for one in self.rounds_of_any if one in self._resident}
        return tuple(sorted(ready))

    @property
    def greedy(self) -> frozenset[RoundShape]:
        """Shapes whose program for greedy requests is compiled."""
        return frozenset(one.shape for one in self._greedy if one in self._resident)

    @property
    def missing(self) -> tuple[Call, ...]:
        """Those of all rounds and `small_prefills` that are not compiled yet, in their order."""
        some = (*self.rounds_of_any, *self.small_prefills)
        return tuple(one for one in some if one not in self._resident)

    @property
    def sizes_missing(self) -> frozenset[int]:
        """Batch buckets of which a round is not compiled yet."""
        missing = (one for one in self.rounds_of_any if one not in self._resident)
        return frozenset(one.shape.size for one in missing)

    @property
    def prefills(self) -> tuple[PrefillShape, ...]:
        """Shapes of prefill calls whose program is compiled, and the full one; by their tokens."""
        full = full_shape(self._config)
        return tuple(
            shape
            for shape in prefill_shapes(self._config)
            if shape == full or Prefill(shape) in self._resident
        )

    @property
    def rounds(self) -> dict[int, tuple[int, ...]]:
        """Values of K whose rounds are compiled, by batch bucket; both ascending."""
        by_size = itertools.groupby(self.compiled, key=lambda shape: shape.size)
        return {size: tuple(shape.num_draft for shape in shapes) for size, shapes in by_size}

    def time_idle(self, state: step.State, shape: RoundShape) -> tuple[step.State, float]:
        """Runs a compiled round over the dummy slot; `state` is consumed. Waits for the device
        before and after.

        Returns:
          The next state, and the seconds of the round.
        """
        plan = timed_plan(shape, state.controls.counts.shape[1], self._config)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, result = self._dispatch(Round(shape), state, plan, None)
        result.fetch()
        return state, time.perf_counter() - start

    def run_once(self, state: step.State) -> step.State:
        """Runs all compiled programs over idle slots; `state` is consumed. Returns the next state.

        First calls load kernels, and on a GPU the second one makes the CUDA graph: a request would
        wait for them.
        """
        for call in tuple(self._resident):
            plan = call.idle_plan(self._config)
            for _ in range(_FIRST_CALLS):
                state, result = self._dispatch(call, state, plan, None)
                result.fetch()
        return state

    def warm_up(
        self, state: step.State, on_compiled: Callable[[], None], some: Sequence[Call]
    ) -> None:
        """Compiles full prefills, copies and `some` others where missing, `AT_ONCE` at a time.

        `on_compiled` is called after each program.
        """
        first = self.rounds_of_any[0]
        if self._layouts_are_free:  # before the others, which take the weights as they lie then
            self._prepare_call(first, state)
            if first in some:
                on_compiled()
        calls = [one for one in (*self.full_prefills, *some) if one not in self._resident]
        copies = [one for one in self.copies if one not in self._compiled]
        jobs = [partial(self._prepare_call, one, state) for one in calls]
        jobs += [partial(self._ready, one, state) for one in copies]
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()
