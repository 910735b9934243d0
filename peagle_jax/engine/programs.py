"""The compiled device programs of an engine: one prefill, and one round per batch bucket.

Each is compiled ahead of time for its exact shapes, so a running engine cannot recompile: a call
either finds its program or, before warm-up, compiles it once.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

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

        def jitted(function: Callable):
            def run(weights, state, plan):
                target, drafter = jax.tree.unflatten(structure, weights)
                return function(target, drafter, state, plan, **static)

            run.__name__ = function.__name__
            # The state is donated: caches are updated in place.
            return jax.jit(run, donate_argnums=1)

        self._prefill = jitted(step.prefill)
        self._round = jitted(step.speculative_step)
        self._compiled: dict[object, Callable] = {}
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
        arrays = device_decode_plan(plan)
        program = self._get(len(plan.slots), self._round, state, arrays)
        return program(self._weights, state, arrays)

    def _get(self, key, function, state, plan) -> Callable:
        program = self._compiled.get(key)
        if program is None:
            program = function.lower(*jax.tree.map(_spec, (self._weights, state, plan))).compile()
            with self._lock:
                program = self._compiled.setdefault(key, program)
        return program

    def warm_up(self, state: step.State, on_compiled: Callable[[], None]) -> None:
        """Compiles every program, several at a time; `on_compiled` is called after each."""
        idle = host.PrefillPlan.build([], self._config)
        jobs = [partial(self._get, "prefill", self._prefill, state, device_prefill_plan(idle))]
        for size in self._config.batch_buckets:
            arrays = device_decode_plan(host.DecodePlan.build([], size, self._config))
            jobs.append(partial(self._get, size, self._round, state, arrays))
        with ThreadPoolExecutor(max_workers=4) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
                on_compiled()


def _spec(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf))
