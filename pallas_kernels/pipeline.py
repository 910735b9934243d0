"""Multistage pipelines: rings of shared-memory slots that TMA fills some steps ahead of the MMA.

Step n uses slot n % stages. In the timelines `load n` means that the copies of step n are in
flight, and `mma n` that the tiles of step n are read. Time runs to the right, one column per step;
a slot is refilled at the end of a step, after the last read of its tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def warpgroup_index(groups: int) -> Any:
    """Index of this warpgroup among the `groups` of its block."""
    return lax.axis_index("group") if groups > 1 else 0


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Ring that one warpgroup fills and reads.

    With stages = 3:

                start     step 0    step 1    step 2    step 3    step 4
        slot 0  load 0    mma 0     load 3    load 3    mma 3     load 6
        slot 1  load 1    load 1    mma 1     load 4    load 4    mma 4
        slot 2  load 2    load 2    load 2    mma 2     load 5    load 5

    Attributes:
      stages: slots of the ring, at most `num_steps`.
      num_steps: steps of the whole loop, a number or a scalar of the kernel.
      fetch: `fetch(step, place)` starts the copies of a step to a place in the buffers; they arrive
        at the ready barrier of the place. The place is the slot, unless several warpgroups have
        rings.
      ready_barrier: [places]; all copies to a place have arrived.
      fenced: threads read the tiles, as they do to unpack weights. A fence then orders these reads
        before the next TMA write. Reads by the MMA need no fence.
    """

    stages: int
    num_steps: Any
    fetch: Callable[[Any, Any], None]
    ready_barrier: Any
    fenced: bool

    def start(self) -> None:
        """Prologue: loads the first `stages` steps."""
        for i in range(self.stages):
            self._load(jnp.int32(i), i)  # a Python int would be bounds-checked while tracing

    def wait(self, slot: Any) -> Any:
        """Waits until the tiles of a slot have arrived; returns their place in the buffers."""
        place = self._place(slot)
        plgpu.barrier_wait(self.ready_barrier.at[place])
        return place

    def each_step(self, first: Any, count: Any, visit: Callable, carry: Any) -> Any:
        """Runs `carry = visit(step, slot, refill, carry)` for `count` steps from `first` on.

        `visit` calls `wait(slot)` before it reads the tiles and `refill()` after their last use.
        """

        def body(i, carry):
            step = first + i
            slot = lax.rem(step, self.stages)
            return visit(step, slot, lambda: self._refill(step, slot), carry)

        return lax.fori_loop(0, count, body, carry)

    def _place(self, slot: Any) -> Any:
        """Index of a slot in buffers and barriers that hold the rings of all warpgroups."""
        return slot

    def _load(self, step: Any, slot: Any) -> None:
        self.fetch(step, self._place(slot))

    def _refill(self, step: Any, slot: Any) -> None:
        @pl.when(step + self.stages < self.num_steps)
        def _():
            if self.fenced:
                plgpu.commit_smem()
            self._load(step + self.stages, slot)


@dataclass(frozen=True, kw_only=True)
class SharedPipeline(Pipeline):
    """Rings of a block whose warpgroups have their own weight tiles and share the x tiles.

    Each warpgroup fills and reads a ring of its own, as in `Pipeline`. Warpgroup 0 also fills the
    shared ring, one step late: a slot is refilled after all warpgroups have released it, and at the
    end of the next step they usually have. Without the delay warpgroup 0 would wait for the slowest
    one in every step. All warpgroups would then unpack weights at the same time, and the tensor
    cores would be idle meanwhile.

    With stages = 3:

                          start     step 0    step 1    step 2    step 3    step 4
        own slot 0        load 0    mma 0     load 3    load 3    mma 3     load 6
        shared slot 0     load 0    mma 0     free      load 3    mma 3     free
        shared slot 1     load 1    load 1    mma 1     free      load 4    mma 4

    At the end of step n each warpgroup releases the shared slot of step n. Warpgroup 0 then waits
    for all releases of step n - 1 and loads step n + 2 to that slot. With two stages there is no
    delay, because the next step needs the slot.

    Attributes:
      groups: warpgroups of the block, at least two. Slot s of warpgroup g has place g * stages + s.
      fetch_shared: `fetch_shared(step, slot)`, as `fetch` for the shared ring.
      shared_ready_barrier: [stages]; the copies of a shared slot have arrived.
      shared_free_barrier: [stages], `groups` arrivals; all warpgroups have released a shared slot.
    """

    groups: int
    fetch_shared: Callable[[Any, Any], None]
    shared_ready_barrier: Any
    shared_free_barrier: Any

    def start(self) -> None:
        for i in range(self.stages):
            step = jnp.int32(i)
            self._load(step, i)
            pl.when(warpgroup_index(self.groups) == 0)(partial(self.fetch_shared, step, i))

    def wait(self, slot: Any) -> Any:
        """Waits for the own and the shared tiles of a slot; returns the place of the own ones."""
        place = super().wait(slot)
        plgpu.barrier_wait(self.shared_ready_barrier.at[slot])
        return place

    def _place(self, slot: Any) -> Any:
        return warpgroup_index(self.groups) * self.stages + slot

    def _refill(self, step: Any, slot: Any) -> None:
        @pl.when(step + self.stages < self.num_steps)
        def _():
            if self.fenced:
                plgpu.commit_smem()
            plgpu.barrier_arrive(self.shared_free_barrier.at[slot])
            self._load(step + self.stages, slot)

        delay = 1 if self.stages > 2 else 0
        released = step - delay
        shared_slot = slot if not delay else lax.rem(slot + self.stages - delay, self.stages)
        has_next = (released >= 0) & (released + self.stages < self.num_steps)

        @pl.when(has_next & (warpgroup_index(self.groups) == 0))
        def _():
            plgpu.barrier_wait(self.shared_free_barrier.at[shared_slot])
            self.fetch_shared(released + self.stages, shared_slot)


def make_pipeline(
    *,
    groups: int,
    fetch_weights: Callable[[Any, Any], None],
    fetch_x: Callable[[Any, Any, Any], None],
    ready_barrier: Any,
    x_ready_barrier: Any,
    x_free_barrier: Any,
    **ring: Any,
) -> Pipeline:
    """The ring of a warpgroup that reads tiles of a weight and of x; a `SharedPipeline` if there
    are barriers of x.

    `fetch_x(step, slot, barrier)` starts the copies of x, which arrive at `barrier.at[slot]`. The
    other arguments are those of the classes.
    """
    if x_free_barrier is not None:
        return SharedPipeline(
            fetch=fetch_weights,
            groups=groups,
            fetch_shared=lambda i, slot: fetch_x(i, slot, x_ready_barrier),
            ready_barrier=ready_barrier,
            shared_ready_barrier=x_ready_barrier,
            shared_free_barrier=x_free_barrier,
            **ring,
        )

    def fetch(i, slot):
        fetch_weights(i, slot)
        fetch_x(i, slot, ready_barrier)

    return Pipeline(fetch=fetch, ready_barrier=ready_barrier, **ring)


@dataclass(frozen=True, kw_only=True)
class PagedPipeline:
    """Ring of blocks of a paged cache. The number of blocks is known at run time only.

    The page ids of step n + stages are read at the beginning of step n, to hide the latency of the
    page table. A barrier says when a slot has been read: on Hopper the warpgroups arrive at it, on
    Blackwell an asynchronous MMA does, so there the slot is refilled during the next MMA.

    With stages = 3:

                           start     step 0    step 1    step 2    step 3
        Hopper     slot 0  load 0    mma 0     load 3    load 3    mma 3
        Blackwell  slot 0  load 0    mma 0     mma 0     load 3    mma 3
                   slot 1  load 1    load 1    mma 1     mma 1     load 4
        page ids           0 1 2     3         4         5         6

    Attributes:
      stages: slots of the ring.
      end: number of the last step, plus 1.
      fetch: `fetch(step, pages)` starts the copies of a step from its pages.
      read_barrier: [stages]; the tiles of a slot have been read. None: the caller has read them.
    """

    stages: int
    end: Any
    fetch: Callable[[Any, Any], None]
    read_barrier: Any = None

    def start(self, first: Any, pages: Sequence[Any]) -> None:
        """Prologue: loads `stages` steps from `first` on, or fewer before `end`; `pages` of
        each."""
        for ahead, step_pages in enumerate(pages):
            step = first + ahead
            pl.when(step < self.end)(partial(self.fetch, step, step_pages))

    def refill(self, step: Any, pages: Any) -> None:
        """Waits until the slot of `step` has been read, and loads step + stages from its pages."""
        if self.read_barrier is not None:
            plgpu.barrier_wait(self.read_barrier.at[lax.rem(step, self.stages)])
        again = step + self.stages
        pl.when(again < self.end)(partial(self.fetch, again, pages))
