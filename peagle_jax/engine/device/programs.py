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
from peagle_jax.engine.device import layouts, ring_copies
from peagle_jax.engine.device.compilation import Recipe
from peagle_jax.engine.device.compiler_options import compiler_options
from peagle_jax.engine.device.device_calls import (
    CONTROLS,
    PREFILL,
    RINGS,
    SCORED_PREFILL,
    GreedyRound,
    Key,
    prefill_key,
)
from peagle_jax.engine.device.memory import carve_holes
from peagle_jax.engine.device.output_shapes import prefill_output, round_output, spec_of
from peagle_jax.engine.device.read_only_state import join, split, without
from peagle_jax.engine.device.round_shapes import greedy_shapes, round_shapes
from peagle_jax.engine.device.stored_programs import StoredPrograms
from peagle_jax.engine.device.stored_times import StoredTimes
from peagle_jax.engine.device.transfer import Resident, Result, pack, pack_on_device, unpack
from peagle_jax.engine.host.calls import DecodeCall, RoundShape, idle_prefill, timed_plan
from peagle_jax.engine.host.controls import idle_controls
from peagle_jax.engine.host.prefill_shapes import PrefillShape, full_shape, prefill_shapes
from peagle_jax.method import adjust, step
from peagle_jax.method.drafter import with_num_draft
from peagle_jax.method.plan import ControlsPlan, DecodePlan, PrefillPlan, mask_words
from peagle_jax.method.repeated_rounds import speculative_rounds
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
        self._config = config
        self.shapes = round_shapes(config)
        """Shapes of the rounds that `warm_up` compiles without a choice of its own."""
        first = len(config.batch_buckets)
        greedy = map(GreedyRound, greedy_shapes(config))
        self.round_keys: tuple[Key, ...] = (*self.shapes[:first], *greedy, *self.shapes[first:])
        """All rounds, in the order in which they compile."""
        self._prefill_shapes = {prefill_key(one, config): one for one in prefill_shapes(config)}
        self.small_prefills: tuple[Key, ...] = tuple(self._prefill_shapes)[:-1]
        devices = devices or Devices()
        target = with_activations(target, config)
        weights, structure = jax.tree.flatten((target, drafter))
        self._shapes = jax.tree.unflatten(structure, map(spec_of, weights))
        self._taps, self._accept = taps, accept
        self._devices, self._weights = devices, devices.take_weights(weights)
        self.stored_times = StoredTimes(self._weights, structure, config)
        static = dict(taps=taps, max_logprobs=config.max_logprobs, accept=accept)
        places = [dispatch.default_device()] if devices.mesh is None else [*devices.mesh.devices]
        self._stored = StoredPrograms(structure, config, places, static)

        def models(weights, num_draft):
            target, drafter = jax.tree.unflatten(structure, devices.leaves(weights))
            return target, with_num_draft(drafter, num_draft)

        # Donated buffers: the state (caches are updated in place) and the previous call's output.
        @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames="scores")
        @devices.program
        def prefill(weights, state, plan, mask, previous, *, scores):
            args = (*models(weights, config.num_draft), state, plan, mask)
            state, output = step.prefill(*args, scores=scores, **static)
            return state, pack_on_device(output)

        shape = ("num_draft", "repeat")

        @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames=shape)
        @devices.program
        def speculative_step(weights, written, plan, mask, previous, kept, *, num_draft, repeat):
            own, state = partial(models, weights, num_draft), join(written, kept)
            if repeat > 1:
                state, output = speculative_rounds(own, state, plan, repeat=repeat, **static)
            else:
                state, output = step.speculative_step(*own(), state, plan, mask, **static)
            return without(state, kept), pack_on_device(output)

        @partial(jax.jit, donate_argnums=0)
        def controls(all_controls, packed):
            return adjust.fill(all_controls, unpack(packed, idle_controls(config)))

        self._prefill, self._round, self._controls = prefill, speculative_step, controls
        self._compiled: dict[Key, Callable] = {}
        self._resident: dict[Key, Resident] = {}
        self._lock = threading.Lock()
        self._layouts_are_free = devices.count == 1 and dispatch.platform() in layouts.PLATFORMS
        self._between_holes = carve_holes(devices.count) if dispatch.platform() == "cuda" else []

    def init_state(self, target: TargetConfig, drafter: DrafterConfig | None) -> step.State:
        """The state of an engine. That of weights which are shapes has shapes only: nothing can run
        on it."""
        is_shape = isinstance(self._weights[0], jax.ShapeDtypeStruct)
        make = self._devices.state_shape if is_shape else self._devices.init_state
        return make(target, drafter, self._config)

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
        key = prefill_key(PrefillShape(*plan.tokens.shape), self._config)
        return self._dispatch(SCORED_PREFILL if scores else key, state, plan, mask)

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
        key = GreedyRound(shape)
        key = key if is_greedy and key in self._resident else shape
        return self._dispatch(key, state, plan, mask)

    def control(self, state: step.State, plan: ControlsPlan) -> step.State:
        """Dispatches the write of a request's sampling controls; `state` is consumed."""
        written = self._ready(CONTROLS, state)(state.controls, pack(plan))
        return replace(state, controls=written)

    def copy_rings(self, state: step.State, source: int, target: int) -> step.State:
        """Dispatches the copy of all rings of one row to another; `state` is consumed."""
        copied = self._ready(RINGS, state)(*ring_copies.operands(state, source, target))
        return ring_copies.with_copied(state, copied)

    def _dispatch(
        self,
        key: Key,
        state: step.State,
        plan: PrefillPlan | DecodePlan,
        mask: np.ndarray | None,
    ) -> tuple[step.State, Result]:
        program, resident = self._ready(key, state), self._resident[key]
        resident.upload(plan, mask)
        given = (resident.plan, resident.mask, resident.bits)
        if isinstance(key, str):
            state, resident.bits = program(self._weights, state, *given)
        else:
            written, kept = split(state, key)
            written, resident.bits = program(self._weights, written, *given, kept)
            state = join(written, (state.params, state.controls))
        return state, Result(resident.bits, resident.layout)

    def _ready(self, key: Key, state: step.State) -> Callable:
        """The program of `key`, compiled if it is not yet."""
        if key not in (self._compiled if key in (CONTROLS, RINGS) else self._resident):
            self._prepare(key, state)
        return self._compiled[key]

    def _prepare(self, key: Key, state: step.State) -> None:
        """Compiles the program of `key`, and those that copy its plan and mask in."""
        if self._layouts_are_free and key not in (CONTROLS, RINGS, self.round_keys[0]):
            self._prepare(self.round_keys[0], state)  # it chooses the layouts for all
        lower, operands, make_resident = self._lowering(key, state)
        self._compile(key, lower, operands)
        if make_resident is not None:
            resident = make_resident()
            resident.compile()
            # A program that two threads prepare keeps its first buffers: a plan may lie there.
            self._resident.setdefault(key, resident)

    def _lowering(
        self, key: Key, state: step.State
    ) -> tuple[Callable, tuple, Callable[[], Resident] | None]:
        """The function that lowers the program of `key`, the shapes of its operands, and the maker
        of the buffers of its calls.

        `state` may be one of shapes.
        """
        specs = lambda *operands: jax.tree.map(spec_of, operands)
        if key == CONTROLS:
            packed = pack(idle_controls(self._config))
            return self._controls.lower, specs(state.controls, packed), None
        if key == RINGS:
            operands = ring_copies.operands(state)
            return ring_copies.program(operands[0]).lower, specs(*operands), None
        config, is_greedy, idle = self._config, isinstance(key, GreedyRound), self._idle_plan(key)
        if isinstance(key, str):
            scores, T = key == SCORED_PREFILL, 1
            shape = self._prefill_shape(key)
            rows, lower = shape.rows, partial(self._prefill.lower, scores=scores)
            output = prefill_output(config, shape, scores=scores)
            parts = (state,)
        else:
            shape = key.shape if is_greedy else key
            rows, T, repeat = shape.size, shape.num_draft + 1, config.repeat if is_greedy else 1
            sizes = dict(num_draft=shape.num_draft, repeat=repeat)
            lower = partial(self._round.lower, **sizes)
            output = round_output(config, shape, is_greedy=is_greedy)
            parts = split(state, key)
        mask_shape = (rows, T, mask_words(state.controls.counts.shape[1]))
        if is_greedy:
            mask_shape = None
        output = self._devices.reported(output)
        buffers = idle, mask_shape, output, self._devices.copied
        written, *kept = parts
        others = (written, *Resident.shapes(*buffers), *kept)
        if self._layouts_are_free:
            layouts.move(self._weights, self._round, key, specs(*others))
            self._layouts_are_free = False
        make_resident = partial(Resident, *buffers)
        return lower, specs(layouts.shapes(self._weights), *others), make_resident

    def _prefill_shape(self, key: str) -> PrefillShape:
        return self._prefill_shapes.get(key, full_shape(self._config))

    def _idle_plan(self, key: Key) -> PrefillPlan | DecodePlan:
        """The plan of a call without a request."""
        if isinstance(key, str):
            return idle_prefill(self._config, self._prefill_shape(key))
        shape = key.shape if isinstance(key, GreedyRound) else key
        return DecodeCall.build([], shape, self._config).plan

    def file_of(self, key: Key, state: step.State) -> Path | None:
        """Where the program of `key` is kept on disk; None if programs are not kept. `state` may be
        one of shapes."""
        _, operands, _ = self._lowering(key, state)
        return self._stored.path_of(repr(key), operands, compiler_options())

    def store(self, key: Key, state: step.State) -> None:
        """Compiles the program of `key` onto disk only, and those of its transfers into jax's own
        cache. `state` may be one of shapes, and the weights too."""
        lower, operands, make_resident = self._lowering(key, state)
        self._make(key, lower, operands)
        if make_resident is not None and jax.config.jax_compilation_cache_dir is not None:
            make_resident().compile()

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

    def not_on_disk(self, keys: Sequence[Key], state: step.State) -> tuple[Key, ...] | None:
        """Those of `keys` that are neither compiled nor on disk; None if programs are not kept on
        disk."""
        files = {key: self.file_of(key, state) for key in keys if key not in self._compiled}
        if None in files.values():
            return None
        return tuple(key for key, file in files.items() if not file.exists())

    def _make(self, key: Key, lower: Callable, operands: tuple) -> Callable:
        results = operands[0] if key in (CONTROLS, RINGS) else (operands[1], operands[4])
        options = compiler_options()
        return self._stored.program(repr(key), operands, results, lower, options)

    def _compile(self, key: Key, lower: Callable, operands: tuple) -> None:
        if key not in self._compiled:
            program = self._make(key, lower, operands)
            with self._lock:
                self._compiled.setdefault(key, program)

    @property
    def compiled(self) -> tuple[RoundShape, ...]:
        """Shapes whose rounds are compiled, ascending; for greedy requests at least."""
        shapes = {key for key in tuple(self._resident) if isinstance(key, RoundShape)}
        return tuple(sorted(shapes | self.greedy))

    @property
    def greedy(self) -> frozenset[RoundShape]:
        """Shapes whose program for greedy requests is compiled."""
        keys = tuple(self._resident)
        return frozenset(key.shape for key in keys if isinstance(key, GreedyRound))

    @property
    def greedy_keys(self) -> tuple[Key, ...]:
        """Those of `round_keys` that greedy requests without logprobs and controls need."""
        others = {key.shape for key in self.round_keys if isinstance(key, GreedyRound)}
        return tuple(key for key in self.round_keys if key not in others)

    @property
    def full_prefills(self) -> tuple[Key, ...]:
        """The largest prefill, and with `prompt_logprobs` the one that scores prompts."""
        return PREFILL, *[SCORED_PREFILL] * self._config.prompt_logprobs

    @property
    def copies(self) -> tuple[Key, ...]:
        """Programs that only move data: the controls of a request, and the rings of a beginning."""
        return CONTROLS, *[RINGS] * bool(self._config.saved_rings)

    @property
    def missing(self) -> tuple[Key, ...]:
        """Those of `round_keys` and `small_prefills` that are not compiled yet, in their order."""
        keys = (*self.round_keys, *self.small_prefills)
        return tuple(key for key in keys if key not in self._resident)

    @property
    def prefills(self) -> tuple[PrefillShape, ...]:
        """Shapes of prefill calls whose program is compiled, and the full one; by their tokens."""
        ready = {PREFILL, *self._resident}
        return tuple(shape for key, shape in self._prefill_shapes.items() if key in ready)

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
        state, result = self._dispatch(shape, state, plan, None)
        result.fetch()
        return state, time.perf_counter() - start

    def run_once(self, state: step.State) -> step.State:
        """Runs all compiled programs over idle slots; `state` is consumed. Returns the next state.

        First calls load kernels, and on a GPU the second one makes the CUDA graph: a request would
        wait for them.
        """
        for key in tuple(self._resident):
            plan = self._idle_plan(key)
            for _ in range(_FIRST_CALLS):
                state, result = self._dispatch(key, state, plan, None)
                result.fetch()
        return state

    def warm_up(
        self, state: step.State, on_compiled: Callable[[], None], rounds: Sequence[Key]
    ) -> None:
        """Compiles prefill, the controls and the `rounds` (or smaller prefills) where missing,
        `AT_ONCE` at a time.

        `on_compiled` is called after each program.
        """
        missing = [key for key in (*self.full_prefills, *rounds) if key not in self._resident]
        missing += [key for key in self.copies if key not in self._compiled]
        if self._layouts_are_free:
            self._prepare(self.round_keys[0], state)
        jobs = [partial(self._prepare, key, state) for key in missing]
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()
