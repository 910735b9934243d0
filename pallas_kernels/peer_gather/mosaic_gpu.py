"""The kernel of `peer_gather`: each thread block sends its part of a message to all peers and
receives theirs.

A kernel may wait for another GPU because all of its thread blocks run at once: there are at most
128, of 128 threads without shared memory, and two of them fit on a multiprocessor. Thread block b
waits for thread blocks b of its peers only.

The body is inline MLIR, on the registers of one thread: Pallas has no loads and stores at an
address that is a number. `loads` has what a thread sends.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.dispatch import Launch
from pallas_kernels.peer_gather import mailbox
from pallas_kernels.peer_gather.loads import MixtureLoads, SumLoads
from pallas_kernels.peer_gather.mailbox import EMPTY, HALVES_BYTES, OTHER_NAN, THREADS, UNIT_BYTES
from pallas_kernels.words import (
    asm,
    behind,
    constant,
    global_address,
    load,
    load_address,
    plus,
    times,
    when,
)

SECONDS = 60
"""A thread that waits longer for a peer ends the kernel with an error of the device."""

_RECEIVE = f"""{{
.reg .pred empty, late;
.reg .b64 start, now;
mov.u64 start, %globaltimer;
AGAIN:
ld.volatile.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
setp.eq.s32 empty, $0, {EMPTY};
setp.eq.or.s32 empty, $1, {EMPTY}, empty;
setp.eq.or.s32 empty, $2, {EMPTY}, empty;
setp.eq.or.s32 empty, $3, {EMPTY}, empty;
@!empty bra DONE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
setp.gt.s64 late, now, {SECONDS * 1_000_000_000};
@late trap;
bra AGAIN;
DONE:
st.volatile.global.v4.b32 [$4], {{{EMPTY}, {EMPTY}, {EMPTY}, {EMPTY}}};
}}"""


@functools.partial(jax.jit, static_argnames=("dtype", "num_devices", "unit_bytes", "launch"))
def gather_sum(
    parts: jax.Array,
    dtype: jnp.dtype,
    links: jax.Array,
    num_devices: int,
    unit_bytes: int,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """As `api.gather_sum`: parts [parts, N] -> [n, N]."""
    num_parts, N = parts.shape
    num_units = N * dtype.itemsize // unit_bytes

    def loads_of(parts):
        return SumLoads(parts, num_parts, num_units, unit_bytes, rounded=parts_dtype != dtype)

    parts_dtype = parts.dtype
    return _exchange((parts,), loads_of, (N,), dtype, num_units, links, num_devices, launch)


@functools.partial(jax.jit, static_argnames=("num_rows", "num_devices", "launch"))
def gather_mixture(
    values: jax.Array,
    weights: jax.Array,
    rows: jax.Array,
    links: jax.Array,
    num_rows: int,
    num_devices: int,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """As `api.gather_mixture`: values bfloat16 [slots, D], weights and rows [k, R']; [n, R, D]."""
    D = values.shape[-1]
    operands = values, weights, rows
    num_units = num_rows * D * values.dtype.itemsize // UNIT_BYTES
    loads_of = functools.partial(MixtureLoads, rows.shape, D)
    shape = num_rows, D
    return _exchange(operands, loads_of, shape, values.dtype, num_units, links, num_devices, launch)


def _exchange(
    operands: tuple[jax.Array, ...],
    loads_of: Callable,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    num_units: int,
    links: jax.Array,
    num_devices: int,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """Gathers arrays [shape], of which `loads_of(*addresses of operands)` loads this device's."""
    blocks, each = mailbox.blocks_of(num_units)

    def body(
        *refs,  # operands, links [LINKS] int32, out [n, *shape]
    ):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT(()),))
        def exchange(_, *refs_and_block):
            *sources, links, out = map(global_address, refs_and_block[:-1])
            block = refs_and_block[-1].registers.flat[0]
            _emit(loads_of(*sources), links, out, block, num_devices, num_units, each)

        exchange(*refs, lax.axis_index("block"))

    links_ref = jax.new_ref(links)
    gathered = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_devices, *shape), dtype),
        grid=(blocks,),
        grid_names=("block",),
        # Safe without barriers: no shared memory, and only inline code touches memory.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=launch.interpret,
        kernel_name="peer_gather",
    )(*operands, links_ref)
    return gathered, links_ref[...]


def _emit(loads, links, out, block, num_devices: int, num_units: int, each: int) -> None:
    """Code of one thread.

    Args:
      loads: `loads(unit)` emits the loads of a unit: its words, four or two.
      links, out: addresses.
      each: units of a thread block.
    """
    thread = asm("mov.u32 $0, %tid.x;", "=r", [], mlir.i32())
    rank = load(links, 0)
    counter = behind(links, times(plus(block, mailbox.COUNTERS), 4))
    number = plus(load(counter, 0), 1)
    slot = mlir.arith.andi(number, constant(1))
    halved = loads.unit_bytes == HALVES_BYTES

    def unit_of(mailbox_address, sender, at):
        """Address of a unit, of those of this thread block."""
        index = plus(times(slot, num_devices), sender)
        index = plus(times(index, mailbox.BLOCKS), block)
        index = plus(times(index, mailbox.UNITS), at)
        return behind(mailbox_address, times(index, UNIT_BYTES))

    def store(sender, unit, words):
        row = behind(out, times(sender, num_units * loads.unit_bytes))
        names = ", ".join(f"${i + 1}" for i in range(len(words)))
        text = f"st.global.v{len(words)}.b32 [$0], {{{names}}};"
        asm(text, "l" + ",r" * len(words), [behind(row, times(unit, loads.unit_bytes)), *words])

    mailbox_of = lambda device: load_address(behind(links, times(device, 8)), mailbox.ADDRESSES)
    peers = [mlir.arith.remui(plus(rank, i), constant(num_devices)) for i in range(1, num_devices)]
    own, others = mailbox_of(rank), [mailbox_of(peer) for peer in peers]
    places = []  # units of this thread within its block, and in the message
    for first in range(0, each, THREADS):
        at = plus(thread, first)
        places.append((at, plus(times(block, each), at)))

    # A thread past the end sends and receives nothing: a unit has one reader, which empties it.
    def exists(at, unit):
        if each % THREADS == 0 and num_units % each == 0:
            return None  # all exist
        less = mlir.arith.CmpIPredicate.ult
        within = mlir.arith.cmpi(less, at, constant(each))
        return mlir.arith.andi(within, mlir.arith.cmpi(less, unit, constant(num_units)))

    # All before the first store, so that they overlap.
    loaded = [loads(mlir.arith.minui(unit, constant(num_units - 1))) for _, unit in places]
    for (at, unit), words in zip(places, loaded, strict=True):
        with when(exists(at, unit)):
            if not halved:  # also in the sender's own copy: all devices have the same bits
                words = [_not_empty(word) for word in words]
            sent = _halves(words) if halved else words
            for address in others:
                target = unit_of(address, rank, at)
                asm(
                    "st.volatile.global.v4.b32 [$0], {$1, $2, $3, $4};",
                    "l,r,r,r,r",
                    [target, *sent],
                )
            store(rank, unit, words)
    for peer in peers:
        for at, unit in places:
            with when(exists(at, unit)):
                four = mlir.llvm.StructType.get_literal([mlir.i32()] * 4)
                received = asm(_RECEIVE, "=&r,=&r,=&r,=&r,l", [unit_of(own, peer, at)], four)
                words = [mlir.llvm.extractvalue(mlir.i32(), received, [i]) for i in range(4)]
                store(peer, unit, _joined(words) if halved else words)
    # The number changes after all threads have read it.
    text = (
        "{ .reg .pred first; bar.sync 1, 128; setp.eq.s32 first, $2, 0; "
        "@first st.global.b32 [$0], $1; }"
    )
    asm(text, "l,r,r", [counter, number, thread])


def _not_empty(word) -> Any:
    is_empty = mlir.arith.cmpi(mlir.arith.CmpIPredicate.eq, word, constant(EMPTY))
    return mlir.arith.select(is_empty, constant(OTHER_NAN), word)


def _halves(words: list) -> list:
    """Two words as four of 16 bits, low half first."""
    low = lambda word: mlir.arith.andi(word, constant(0xFFFF))
    high = lambda word: mlir.arith.shrui(word, constant(16))
    return [half(word) for word in words for half in (low, high)]


def _joined(halves: list) -> list:
    """The inverse of `_halves`."""
    join = lambda low, high: mlir.arith.ori(low, mlir.arith.shli(high, constant(16)))
    return [join(*halves[:2]), join(*halves[2:])]
