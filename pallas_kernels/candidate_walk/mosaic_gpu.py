"""Kernel of the walk over candidates, for Hopper and Blackwell: one thread block per sequence.

The drafts after the first are divided among warpgroups. For a draft, a warpgroup holds
`silu(before[a] + states[d])` of the 16 candidates a as [16, r] in registers, eight threads for each
a, and multiplies it with the row of each candidate b. A sum over r takes three shuffles, and no
barrier. The rows of `before` come through shared memory, because each row of an array has an
address of its own; those of `after` are the same for all a. Then the first warpgroup walks over the
best candidates in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

_C = 16
_EACH = 2
"""Drafts of a warpgroup, if that many warpgroups are enough. With more of them a thread has too few
registers."""
_MOST_GROUPS = 3
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 32), (4, 16), (4, 8), (4, 4))), (-8,), (-2, -7, -5, -3), -1
)
"""Eight threads of a warp share a row of [16, r]; each holds groups of four columns."""


@functools.partial(jax.jit, static_argnames=("scale", "launch"))
def candidate_walk(
    ids: jax.Array,
    values: jax.Array,
    states: jax.Array,
    before: jax.Array,
    after: jax.Array,
    *,
    scale: float,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """`api.candidate_walk`; the edges are [B, J-1, C, C] from a, the last axis, to b."""
    B, J, _ = ids.shape
    rank = states.shape[-1]
    groups = min(_MOST_GROUPS, pl.cdiv(J - 1, _EACH))

    def body(
        ids_gmem,  # [B, J, 16]
        values_gmem,  # [B, J, 16]
        states_gmem,  # [B, J, r]
        before_gmem,  # [V, r]
        after_gmem,  # [V, r]
        taken_gmem,  # [B, 16] int32
        edges_gmem,  # [B, J-1, 16, 16]
        rows_smem,  # [J-1, 16, r]
        best_smem,  # [J, 16] int32
        copied_barrier,  # J-1 of them: the rows of a draft have arrived
        stored_barrier,  # all warpgroups have stored their best candidates
    ):
        b, group = lax.axis_index("sequence"), lax.axis_index("group")

        def of_own(f):
            """Calls f(d) for the drafts d = 1 .. J-1 of this warpgroup."""

            @pl.loop(0, pl.cdiv(J - 1, groups))  # unrolled, it would compile for half a minute
            def _one(i):
                d = 1 + i * groups + group
                pl.when(d < J)(functools.partial(f, d))

        @of_own
        def copy(d):
            rows = [ids_gmem[b, d - 1, a] for a in range(_C)]
            for a in range(_C):
                row = rows_smem.at[d - 1, pl.ds(a, 1)]
                source = before_gmem.at[pl.ds(rows[a], 1)]
                plgpu.copy_gmem_to_smem(source, row, copied_barrier.at[d - 1])

        @of_own
        def score(d):
            rows = [ids_gmem[b, d, c] for c in range(_C)]
            logits = [values_gmem[b, d, c] for c in range(_C)]
            state = _load_row(states_gmem.at[b, d])
            plgpu.barrier_wait(copied_barrier.at[d - 1])
            inner = plgpu.load(rows_smem.at[d - 1], layout=_LAYOUT, optimized=False)
            inner = inner.astype(jnp.float32) + state
            inner = inner / (1 + jnp.exp(-inner))
            largest, best = None, None
            for c in range(_C):
                edge = scale * jnp.sum(inner * _load_row(after_gmem.at[rows[c]]), axis=1)
                edges_gmem[b, d - 1, c] = edge
                score = edge + logits[c]
                if largest is None:
                    largest, best = score, jnp.zeros_like(score, jnp.int32)
                else:
                    best = jnp.where(score > largest, c, best)
                    largest = jnp.maximum(score, largest)
            best_smem[d] = best

        def _walk():
            place = jnp.max(_iota(0), axis=1)  # [16]
            now, taken = 0, jnp.zeros_like(place)
            for d in range(1, J):
                now = best_smem[d, now]
                taken = jnp.where(place == d, now, taken)
            taken_gmem[b] = taken

        plgpu.commit_smem()
        plgpu.barrier_arrive(stored_barrier)
        plgpu.barrier_wait(stored_barrier)
        pl.when(group == 0)(_walk)

    def _load_row(ref) -> jax.Array:
        """ref [r] -> float32 [16, r], the same in each row."""
        row = plgpu.load(ref, layout=_LAYOUT.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row.astype(jnp.float32), (_C, rank), (1,))

    taken, edges = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, _C), jnp.int32),
            jax.ShapeDtypeStruct((B, J - 1, _C, _C), jnp.float32),
        ),
        scratch_types=dict(
            rows_smem=plgpu.SMEM((J - 1, _C, rank), before.dtype),
            best_smem=plgpu.SMEM((J, _C), jnp.int32),
            copied_barrier=plgpu.Barrier(num_arrivals=_C, num_barriers=J - 1),
            stored_barrier=plgpu.Barrier(num_arrivals=groups),
        ),
        # Safe: barriers order each write to shared memory before the reads. Without scratch memory
        # no reduction over several warps compiles, which warpgroups would share.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        grid=(B,),
        grid_names=("sequence",),
        num_threads=groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="candidate_walk",
    )(ids, values, states, before, after)
    return taken[:, :J], edges


def _iota(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (_C, 32), axis, layout=_LAYOUT)
