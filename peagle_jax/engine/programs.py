"""The compiled device programs of an engine: one prefill, and one round per batch bucket.

Each is compiled ahead of time for its exact shapes, so a running engine cannot recompile: a call
either finds its program or, before warm-up, compiles it once.

A call reads and writes the same addresses every time: its plan is copied into arrays that stay, its
output overwrites that of the call before, and what the host reads is a copy. On a GPU a call is one
CUDA graph of hundreds of kernels; were an address new, the driver would be told about each of them,
for 1 to 4 microseconds a kernel. (For the addresses of what only a call itself uses see
`memory.carve_holes`.)
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from peagle_jax import step
from peagle_jax.config import EngineConfig
from peagle_jax.engine import plan as host
from peagle_jax.engine.memory import carve_holes
from peagle_jax.sampling import RequestParams

PREFILL = "prefill"
"""Key of the prefill program; that of a round is its batch size."""

Key = int | str


def device_plan(plan: host.PrefillPlan | host.DecodePlan) -> step.PrefillPlan | step.DecodePlan:
    """The part of a host plan that the device needs."""
    if isinstance(plan, host.DecodePlan):
        return step.DecodePlan(slots=plan.slots, page_table=plan.page_table)
    return step.PrefillPlan(
        slots=plan.slots,
        tokens=plan.tokens,
        start=plan.start,
        count=plan.count,
        next_token=plan.next_token,
        page_table=plan.page_table,
        params=RequestParams(
            seed=plan.seed,
            temperature=plan.temperature,
            top_k=plan.top_k,
            top_p=plan.top_p,
            min_p=plan.min_p,
            num_draft=plan.num_draft,
            num_logprobs=plan.num_logprobs,
        ),
    )


class Programs:
    """Compiles and keeps the programs; weights are passed as flat leaves (cheapest per call)."""

    def __init__(self, target, drafter, config: EngineConfig, *, taps, accept: step.AcceptRule):
        self._config = config
        self._weights, structure = jax.tree.flatten((target, drafter))
        static = dict(taps=taps, max_logprobs=config.max_logprobs, accept=accept)

        # The state is donated, so caches are updated in place, and the output of the call before.
        @partial(jax.jit, donate_argnums=(1, 3), keep_unused=True)
        def prefill(weights, state, plan, previous):
            target, drafter = jax.tree.unflatten(structure, weights)
            return step.prefill(target, drafter, state, plan, **static)

        @partial(jax.jit, donate_argnums=(1, 3), keep_unused=True)
        def speculative_step(weights, state, plan, previous):
            target, drafter = jax.tree.unflatten(structure, weights)
            return step.speculative_step(target, drafter, state, plan, **static)

        self._prefill, self._round = prefill, speculative_step
        self._compiled: dict[Key, Callable] = {}
        self._resident: dict[Key, _Resident] = {}
        self._lock = threading.Lock()
        self._between_holes = carve_holes() if jax.default_backend() == "gpu" else []

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def prefill(self, state: step.State, plan: host.PrefillPlan):
        """Dispatches one prefill call; `state` is consumed. Returns the next state and a `Result`."""
        return self._dispatch(PREFILL, state, plan)

    def round(self, state: step.State, plan: host.DecodePlan):
        """Dispatches one round; `state` is consumed. Returns the next state and a `Result`."""
        return self._dispatch(len(plan.slots), state, plan)

    def _dispatch(self, key: Key, state: step.State, plan: host.PrefillPlan | host.DecodePlan):
        if key not in self._resident:
            self._prepare(key, state)
        resident = self._resident[key]
        resident.update(plan)
        program = self._compiled[key]
        state, resident.output = program(self._weights, state, resident.plan, resident.output)
        return state, Result(resident.output)

    def _prepare(self, key: Key, state: step.State) -> None:
        """Compiles all that prefill or rounds over so many slots run."""
        if key == PREFILL:
            function, idle = self._prefill, host.PrefillPlan.build([], self._config)
            output = self._blank_output(self._config.prefill_rows, 1)
        else:
            function, idle = self._round, host.DecodePlan.build([], key, self._config)
            output = self._blank_output(key, self._config.num_draft + 1)
        resident = _Resident(idle, output)
        self._compile(key, function, state, resident.plan, resident.output)
        # These two are compiled by being used.
        resident.plan = _overwritten(resident.plan, _packed(device_plan(idle)))
        _joined(resident.output)
        self._resident[key] = resident

    def _blank_output(self, rows: int, T: int) -> step.StepOutput:
        """An output, `T` tokens for each of `rows` slots, that no call has made."""
        n = self._config.max_logprobs
        return step.StepOutput(
            packed=jnp.zeros((rows, T + 1), jnp.int32),
            logprobs=jnp.zeros((rows, T), jnp.float32),
            top_ids=jnp.zeros((rows, T, n), jnp.int32),
            top_logprobs=jnp.zeros((rows, T, n), jnp.float32),
        )

    def _compile(self, key: Key, function, *operands) -> None:
        if key not in self._compiled:
            lowered = function.lower(*jax.tree.map(_spec, (self._weights, *operands)))
            program = lowered.compile(compiler_options=_compiler_options())
            with self._lock:
                self._compiled.setdefault(key, program)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes whose rounds are compiled, ascending."""
        return tuple(size for size in self._config.batch_buckets if size in self._resident)

    def warm_up(
        self, state: step.State, on_compiled: Callable[[], None], sizes: Sequence[int]
    ) -> None:
        """Compiles prefill and the rounds of `sizes`, several at a time, unless they are compiled.

        `on_compiled` is called after each.
        """
        missing = {PREFILL, *sizes} - set(self._resident)
        jobs = [partial(self._prepare, key, state) for key in missing]
        with ThreadPoolExecutor(max_workers=4) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()


class _Resident:
    """What stays on the device for calls of one program."""

    def __init__(self, plan: host.PrefillPlan | host.DecodePlan, output: step.StepOutput):
        self.output = output
        idle = device_plan(plan)
        self.plan = jax.tree.map(jnp.array, idle)  # copies: they will be written to
        self._known = _packed(idle)

    def update(self, plan: host.PrefillPlan | host.DecodePlan) -> None:
        """Makes `plan` the one on the device."""
        new = _packed(device_plan(plan))
        if not np.array_equal(new, self._known):
            self.plan, self._known = _overwritten(self.plan, new), new


def _packed(plan) -> np.ndarray:
    """[n] int32: the bits of all leaves, for one transfer instead of one for each."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(plan)])


@partial(jax.jit, donate_argnums=0)
def _overwritten(plan, packed: jax.Array):
    """`plan` with the numbers that `_packed` made of another like it."""
    write = lambda leaf, bits: leaf.at[...].set(lax.bitcast_convert_type(bits, leaf.dtype))
    return jax.tree.map(write, plan, _cut(packed, plan))


class Result:
    """What a call made, on its way to the host: one copy and one transfer."""

    def __init__(self, output: step.StepOutput):
        self._output = output  # for its shapes: the next call overwrites the arrays
        self._bits = _joined(output)
        self._bits.copy_to_host_async()

    def fetch(self) -> step.StepOutput:
        """As numpy arrays; blocks until the device is done."""
        read = lambda leaf, bits: bits.view(leaf.dtype)
        return jax.tree.map(read, self._output, _cut(np.asarray(self._bits), self._output))


def _cut(bits, like):
    """A tree like `like`, of the int32 [n] that all its leaves' bits are: each leaf's, in its shape."""
    leaves, structure = jax.tree.flatten(like)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [
        bits[e - leaf.size : e].reshape(leaf.shape) for e, leaf in zip(ends, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


@jax.jit
def _joined(tree) -> jax.Array:
    """[n] int32: the bits of all leaves."""
    bits = lambda leaf: lax.bitcast_convert_type(leaf, jnp.int32).ravel()
    return jnp.concatenate([bits(leaf) for leaf in jax.tree.leaves(tree)])


def _compiler_options() -> dict[str, bool]:
    if jax.default_backend() != "gpu":
        return {}
    # CUB's sort cannot be part of a CUDA graph. As it stands in a branch (top-k and top-p), the host
    # would wait for the device in each round to learn which branch to launch.
    return {"xla_gpu_enable_cub_radix_sort": False}


def _spec(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf))
