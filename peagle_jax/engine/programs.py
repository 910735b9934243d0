"""The compiled device programs of an engine: one prefill, and one round per batch bucket.

Each is compiled ahead of time for its exact shapes, so a running engine cannot recompile: a call
either finds its program or, before warm-up, compiles it once.

A round reads and writes the same addresses every time: its plan is copied into arrays that stay, its
output overwrites that of the round before, and what the host reads is a copy. On a GPU a round is one
CUDA graph of hundreds of kernels; were an address new, the driver would be told about each of them.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import step
from peagle_jax.config import EngineConfig
from peagle_jax.engine import plan as host
from peagle_jax.sampling import RequestParams


def device_prefill_plan(plan: host.PrefillPlan) -> step.PrefillPlan:
    """The part of a host plan that the device needs."""
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


def device_decode_plan(plan: host.DecodePlan) -> step.DecodePlan:
    """The part of a host plan that the device needs."""
    return step.DecodePlan(slots=plan.slots, page_table=plan.page_table)


class Programs:
    """Compiles and keeps the programs; weights are passed as flat leaves (cheapest per call)."""

    def __init__(self, target, drafter, config: EngineConfig, *, taps, accept: step.AcceptRule):
        self._config = config
        self._weights, structure = jax.tree.flatten((target, drafter))
        static = dict(taps=taps, max_logprobs=config.max_logprobs, accept=accept)

        # The state is donated: caches are updated in place.
        @partial(jax.jit, donate_argnums=1)
        def prefill(weights, state, plan):
            target, drafter = jax.tree.unflatten(structure, weights)
            return step.prefill(target, drafter, state, plan, **static)

        # So is the output of the round before, which nothing reads.
        @partial(jax.jit, donate_argnums=(1, 3), keep_unused=True)
        def speculative_step(weights, state, plan, previous):
            target, drafter = jax.tree.unflatten(structure, weights)
            return step.speculative_step(target, drafter, state, plan, **static)

        self._prefill, self._round = prefill, speculative_step
        self._compiled: dict[object, Callable] = {}
        self._resident: dict[int, _Resident] = {}
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def prefill(self, state: step.State, plan: host.PrefillPlan):
        """Dispatches one prefill call; `state` is consumed."""
        arrays = device_prefill_plan(plan)
        return self._get("prefill", self._prefill, state, arrays)(self._weights, state, arrays)

    def round(self, state: step.State, plan: host.DecodePlan):
        """Dispatches one round; `state` is consumed."""
        size = len(plan.slots)
        if size not in self._resident:
            self._prepare(size, state)
        resident = self._resident[size]
        resident.update(plan)
        program = self._compiled[size]
        state, resident.output = program(self._weights, state, resident.plan, resident.output)
        return state, _copied(resident.output)

    def _prepare(self, size: int, state: step.State) -> None:
        """Compiles all that rounds over `size` slots run."""
        idle = host.DecodePlan.build([], size, self._config)
        resident = _Resident(idle, self._blank_output(size))
        self._get(size, self._round, state, resident.plan, resident.output)
        # These two are compiled by being used.
        resident.plan = _overwritten(resident.plan, device_decode_plan(idle))
        _copied(resident.output)
        self._resident[size] = resident

    def _blank_output(self, size: int) -> step.StepOutput:
        """An output of a round over `size` slots that no round has made."""
        T, n = self._config.num_draft + 1, self._config.max_logprobs
        return step.StepOutput(
            packed=jnp.zeros((size, T + 1), jnp.int32),
            logprobs=jnp.zeros((size, T), jnp.float32),
            top_ids=jnp.zeros((size, T, n), jnp.int32),
            top_logprobs=jnp.zeros((size, T, n), jnp.float32),
        )

    def _get(self, key, function, *operands) -> Callable:
        program = self._compiled.get(key)
        if program is None:
            lowered = function.lower(*jax.tree.map(_spec, (self._weights, *operands)))
            program = lowered.compile(compiler_options=_compiler_options())
            with self._lock:
                program = self._compiled.setdefault(key, program)
        return program

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
        jobs = []
        if "prefill" not in self._compiled:
            idle = device_prefill_plan(host.PrefillPlan.build([], self._config))
            jobs.append(partial(self._get, "prefill", self._prefill, state, idle))
        jobs += [partial(self._prepare, size, state) for size in set(sizes) - set(self.sizes)]
        with ThreadPoolExecutor(max_workers=4) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()


class _Resident:
    """What stays on the device for the rounds over one number of slots."""

    def __init__(self, plan: host.DecodePlan, output: step.StepOutput):
        self.output = output
        self._known = device_decode_plan(plan)
        self.plan = jax.tree.map(jnp.array, self._known)  # copies: they will be written to

    def update(self, plan: host.DecodePlan) -> None:
        """Makes `plan` the one on the device."""
        new = device_decode_plan(plan)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(self._known), strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            self.plan, self._known = _overwritten(self.plan, new), new


@partial(jax.jit, donate_argnums=0)
def _overwritten(old, new):
    return jax.tree.map(lambda o, n: o.at[...].set(n), old, new)


@jax.jit
def _copied(tree):
    return jax.tree.map(jnp.copy, tree)


def _compiler_options() -> dict[str, bool]:
    if jax.default_backend() != "gpu":
        return {}
    # CUB's sort cannot be part of a CUDA graph. As it stands in a branch (top-k and top-p), the host
    # would wait for the device in each round to learn which branch to launch.
    return {"xla_gpu_enable_cub_radix_sort": False}


def _spec(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf))
