"""The compiled device programs of an engine: one for prefill, one per `RoundShape` for rounds, and one
that writes the sampling controls of a request.

Each program is compiled ahead of time for fixed shapes. After `warm_up` no call compiles anything.

On a GPU one call is one CUDA graph of hundreds of kernels. If the address of a buffer changes, the
driver must update every node of the graph, 1 to 4 microseconds each. So all buffers of a call keep
their addresses: the plan is copied into resident arrays, the output overwrites the donated output of
the call before, and the host reads a copy. (`memory.carve_holes` fixes the address of XLA's
temporary buffer.)
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import adjust, step
from peagle_jax.config import EngineConfig
from peagle_jax.drafter import Drafter
from peagle_jax.engine.calls import DecodeCall, PrefillCall, RoundShape
from peagle_jax.engine.controls import idle_controls
from peagle_jax.engine.memory import carve_holes
from peagle_jax.engine.round_shapes import round_shapes
from peagle_jax.engine.stored_times import StoredTimes
from peagle_jax.engine.transfer import Resident, Result, pack, unpack
from peagle_jax.plan import (
    SURVIVAL_BINS,
    ControlsPlan,
    DecodePlan,
    PrefillPlan,
    SurvivalReport,
    mask_words,
)
from peagle_jax.prompt_scores import PromptScores
from peagle_jax.ragged import ragged_step

PREFILL, SCORED_PREFILL, CONTROLS = "prefill", "prefill with scores", "controls"
"""Keys of the programs besides the rounds. The key of a round's program is its `RoundShape`."""

Key = RoundShape | str


class Programs:
    """Compiles and caches the programs. Weights are passed as flat leaves: the cheapest dispatch."""

    def __init__(self, target, drafter, config: EngineConfig, *, taps, accept: step.AcceptRule):
        self._config = config
        self.shapes = round_shapes(config)
        """Shapes of the rounds that `warm_up` compiles without a choice of its own."""
        self._weights, structure = jax.tree.flatten((target, drafter))
        self.stored_times = StoredTimes(self._weights, structure, config)
        static = dict(taps=taps, max_logprobs=config.max_logprobs, accept=accept)

        # Donated buffers: the state (caches are updated in place) and the previous call's output.
        @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames="scores")
        def prefill(weights, state, plan, mask, previous, *, scores):
            target, drafter = jax.tree.unflatten(structure, weights)
            drafter = _with_num_draft(drafter, config.num_draft)
            return step.prefill(target, drafter, state, plan, mask, scores=scores, **static)

        shape = ("num_draft", "num_rows")

        @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames=shape)
        def speculative_step(weights, state, plan, mask, previous, *, num_draft, num_rows):
            target, drafter = jax.tree.unflatten(structure, weights)
            drafter = _with_num_draft(drafter, num_draft)
            args = (target, drafter, state, plan, mask)
            if num_rows:
                return ragged_step(*args, num_rows=num_rows, **static)
            return step.speculative_step(*args, **static)

        @partial(jax.jit, donate_argnums=0)
        def controls(all_controls, packed):
            return adjust.fill(all_controls, unpack(packed, idle_controls(config)))

        self._prefill, self._round, self._controls = prefill, speculative_step, controls
        self._compiled: dict[Key, Callable] = {}
        self._resident: dict[Key, Resident] = {}
        self._lock = threading.Lock()
        self._between_holes = carve_holes() if jax.default_backend() == "gpu" else []

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
        """Dispatches one prefill call; `state` is consumed. Returns the next state and a `Result`."""
        return self._dispatch(SCORED_PREFILL if scores else PREFILL, state, plan, mask)

    def round(
        self,
        state: step.State,
        plan: DecodePlan,
        shape: RoundShape,
        mask: np.ndarray | None = None,
    ):
        """Dispatches one round; `state` is consumed. Returns the next state and a `Result`."""
        return self._dispatch(shape, state, plan, mask)

    def control(self, state: step.State, plan: ControlsPlan) -> step.State:
        """Dispatches the write of a request's sampling controls; `state` is consumed."""
        if CONTROLS not in self._compiled:
            self._prepare(CONTROLS, state)
        return replace(state, controls=self._compiled[CONTROLS](state.controls, pack(plan)))

    def _dispatch(
        self,
        key: Key,
        state: step.State,
        plan: PrefillPlan | DecodePlan,
        mask: np.ndarray | None,
    ):
        if key not in self._resident:
            self._prepare(key, state)
        resident = self._resident[key]
        resident.update(plan, mask)
        program = self._compiled[key]
        state, resident.output = program(
            self._weights, state, resident.plan, resident.mask, resident.output
        )
        return state, Result(resident.output)

    def _prepare(self, key: Key, state: step.State) -> None:
        """Compiles the program of `key`, and those that copy its plan and mask in and its output out."""
        if key == CONTROLS:
            self._compile(
                key, self._controls.lower, state.controls, pack(idle_controls(self._config))
            )
            return
        if key in (PREFILL, SCORED_PREFILL):
            scores = key == SCORED_PREFILL
            lower = partial(self._prefill.lower, scores=scores)
            idle = PrefillCall.build([], self._config).plan
            output = self._blank_output(self._config.prefill_rows, 1, self._config.num_draft)
            if scores:
                output = replace(output, prompt=self._blank_scores())
        else:
            lower = partial(self._round.lower, num_draft=key.num_draft, num_rows=key.num_rows)
            idle = DecodeCall.build([], key, self._config).plan
            output = self._blank_output(key.size, key.num_draft + 1, key.num_draft)
            if self._config.has_survival:
                output = replace(output, report=_blank_report(key.size))
        words = mask_words(state.controls.counts.shape[1])
        resident = Resident(idle, (*output.logprobs.shape, words), output)
        call = (self._weights, state, resident.plan, resident.mask, resident.output)
        self._compile(key, lower, *call)
        resident.compile()
        self._resident[key] = resident

    def _blank_output(self, rows: int, T: int, num_draft: int) -> step.StepOutput:
        """Zeroed output buffers for `T` tokens and `num_draft` drafts of each of `rows` slots."""
        n = self._config.max_logprobs
        return step.StepOutput(
            packed=jnp.zeros((rows, T + 1), jnp.int32),
            drafts=jnp.zeros((rows, num_draft), jnp.int32),
            logprobs=jnp.zeros((rows, T), jnp.float32),
            top_ids=jnp.zeros((rows, T, n), jnp.int32),
            top_logprobs=jnp.zeros((rows, T, n), jnp.float32),
        )

    def _blank_scores(self) -> PromptScores:
        rows = (self._config.prefill_rows, self._config.prefill_chunk)
        top = (*rows, self._config.max_logprobs)
        return PromptScores(
            logprobs=jnp.zeros(rows, jnp.float32),
            ranks=jnp.zeros(rows, jnp.int32),
            top_ids=jnp.zeros(top, jnp.int32),
            top_logprobs=jnp.zeros(top, jnp.float32),
        )

    def _compile(self, key: Key, lower: Callable, *operands) -> None:
        if key not in self._compiled:
            lowered = lower(*jax.tree.map(_spec, operands))
            program = lowered.compile(compiler_options=_compiler_options())
            with self._lock:
                self._compiled.setdefault(key, program)

    @property
    def compiled(self) -> tuple[RoundShape, ...]:
        """Shapes whose rounds are compiled, ascending."""
        return tuple(sorted(key for key in tuple(self._resident) if isinstance(key, RoundShape)))

    @property
    def missing(self) -> tuple[RoundShape, ...]:
        """Those of `shapes` that are not compiled yet, in their order."""
        return tuple(shape for shape in self.shapes if shape not in self._resident)

    @property
    def rounds(self) -> dict[int, tuple[int, ...]]:
        """Values of K whose rounds are compiled, by batch bucket; both ascending. None is ragged."""
        whole = (shape for shape in self.compiled if not shape.num_rows)
        by_size = itertools.groupby(whole, key=lambda shape: shape.size)
        return {size: tuple(shape.num_draft for shape in shapes) for size, shapes in by_size}

    @property
    def ragged(self) -> dict[int, tuple[int, ...]]:
        """Values of R whose rounds are compiled, by batch bucket; both ascending."""
        ragged = (shape for shape in self.compiled if shape.num_rows)
        by_size = itertools.groupby(ragged, key=lambda shape: shape.size)
        return {size: tuple(shape.num_rows for shape in shapes) for size, shapes in by_size}

    def time_idle(self, state: step.State, shape: RoundShape) -> tuple[step.State, float]:
        """Runs a compiled round over idle slots; `state` is consumed. Waits for the device before and after.

        Returns:
          The next state, and the seconds of the round.
        """
        plan = DecodeCall.build([], shape, self._config).plan
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, result = self._dispatch(shape, state, plan, None)
        result.fetch()
        return state, time.perf_counter() - start

    def warm_up(
        self, state: step.State, on_compiled: Callable[[], None], shapes: Sequence[RoundShape]
    ) -> None:
        """Compiles prefill, the controls and the rounds of `shapes` where missing, four at a time.

        `on_compiled` is called after each program.
        """
        prefills = (PREFILL, *[SCORED_PREFILL] * self._config.prompt_logprobs)
        missing = [key for key in (*prefills, *shapes) if key not in self._resident]
        missing += [CONTROLS] * (CONTROLS not in self._compiled)
        jobs = [partial(self._prepare, key, state) for key in missing]
        with ThreadPoolExecutor(max_workers=4) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()


def _with_num_draft(drafter: Drafter | None, num_draft: int) -> Drafter | None:
    """The drafter with this number of drafts: as many as the host counts for the call."""
    if drafter is None or drafter.num_draft == num_draft:
        return drafter
    return replace(drafter, num_draft=num_draft)


def _blank_report(rows: int) -> SurvivalReport:
    return SurvivalReport(
        verified=jnp.zeros(rows, jnp.int32),
        expected=jnp.zeros((), jnp.float32),
        histogram=jnp.zeros(SURVIVAL_BINS, jnp.int32),
    )


def _compiler_options() -> dict[str, bool]:
    if jax.default_backend() != "gpu":
        return {}
    # A CUDA graph cannot contain CUB's sort. Top-k and top-p sort inside a conditional, so with CUB the
    # host would synchronise with the device every round to pick the branch.
    return {"xla_gpu_enable_cub_radix_sort": False}


def _spec(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf))
