"""Block-scaled products in Mosaic's interpreter, which lacks them: copies of scales, and the MMA that reads them.

The stand-ins read the scales where PTX says they lie (tcgen05.mma, scale_vec::1X), by index arithmetic of their
own, and compute in float32. So a test with them shows that a kernel brings the right scales to the right product
and that nothing races. How the instruction adds, only a chip shows.
"""

import dataclasses

import numpy as np
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.experimental.mosaic.gpu import tcgen05

_PlainMma, _PlainCopy = gpu_callbacks.TcGen05Mma, gpu_callbacks.TcGen05Copy
ROWS, GROUPS, GROUP = 128, 4, 32


def scales_of(block: np.ndarray) -> np.ndarray:
    """Scales [.., 32, 16] in shared memory -> [128 rows, 4 groups of 32 columns]."""
    row, group = np.indices((ROWS, GROUPS))
    return block.reshape(32, 16)[row % 32, 4 * (row // 32) + group]


class Copy(_PlainCopy):
    """`async_copy_scales_to_tmem` of the scales of 128 rows and 128 columns."""

    def __call__(self, pipeline_clock, tma_thread_id):
        memory, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
        block, *_ = memory.get_buffer_content(self.smem_key, self.smem_access, self.thread)
        put = dict(increment_clock=False)
        memory.store_buffer_content(
            self.tmem_key, self.tmem_access, scales_of(block), self.thread, **put
        )
        if not memory.detect_races:
            return None
        clock = memory.get_clock(self.thread)
        clock.inc(tma_thread_id)
        where = dict(source_info=self.source_info)
        smem, tmem = (self.smem_key, self.smem_access), (self.tmem_key, self.tmem_access)
        races.check_read(self.thread, clock.async_smem_clock, *smem, **where)
        races.check_write(self.thread, clock.generic_clock, *tmem, **where)
        return clock.copy()


class Mma(_PlainMma):
    """`tcgen05_mma`; with scales each group of 32 columns is a product of its own."""

    def __call__(self, pipeline_clock, tma_thread_id):
        if self.a_scale_key is None:
            return super().__call__(pipeline_clock, tma_thread_id)
        memory = gpu_callbacks._get_shared_memory()
        read = lambda key, access: memory.get_buffer_content(key, access, self.thread)[0]
        scales = [(key, memory.access(key, ())) for key in (self.a_scale_key, self.b_scale_key)]
        a_scale, b_scale = (read(*place).astype(np.float32) for place in scales)
        a, b = read(self.a_key, self.a_access), read(self.b_key, self.b_access)
        a, b = a.astype(np.float32), b.astype(np.float32)
        total = read(self.acc_key, self.acc_access) if self.accumulate else np.float32(0)
        for group in range(GROUPS):
            columns = slice(GROUP * group, GROUP * (group + 1))
            scale = a_scale[: len(a), group, None] * b_scale[None, : b.shape[1], group]
            total = total + scale * (a[:, columns] @ b[columns])
        # The plain MMA checks its operands for races; its result is replaced.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = _PlainMma(**fields | dict(a_scale_key=None, b_scale_key=None, barrier_key=None))
        clock = plain(pipeline_clock, tma_thread_id)
        acc = self.acc_key, self.acc_access
        memory.store_buffer_content(*acc, total, self.thread, increment_clock=False)
        if clock is not None:
            for place in scales:
                gpu_callbacks.get_races().check_read(
                    self.thread, clock.generic_clock, *place, source_info=self.source_info
                )
        barrier = memory.get_barrier(self.barrier_key)
        barrier.arrive(thread=self.thread, clock=clock, logging_info=None)
        return clock


def columns_of_scales(refs) -> int:
    """Columns of tensor memory that these scales take; their layout must be that of block-scaled operands."""
    assert all(ref.layout == tcgen05.scales_layout() for ref in refs)
    return sum(ref.layout.cols_in_shape(ref.shape, 8) for ref in refs)


def install(monkeypatch) -> None:
    """Makes the interpreter take block-scaled products in this test."""
    monkeypatch.setattr(gpu_callbacks, "TcGen05Mma", Mma)
    monkeypatch.setattr(gpu_callbacks, "TcGen05Copy", Copy)
    # Its rule of the copy that it knows serves this one too: parameters and operands are the same.
    copy = primitives.async_copy_scales_to_tmem_p
    monkeypatch.setattr(jaxpr_interpret.gpu_primitives, "async_copy_smem_to_tmem_p", copy)
