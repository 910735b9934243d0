"""The kernel of `peer_gather`: each thread block sends its part of a message to all peers and receives theirs.

A kernel may wait for another GPU because all of its thread blocks run at once: they have 128 threads and no shared
memory, and there are no more of them than multiprocessors. Thread block b waits for thread blocks b of its peers only.

The body is inline MLIR, on the registers of one thread: Pallas has no loads and stores at an address that is a
number.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.dispatch import Launch
from pallas_kernels.peer_gather import mailbox
from pallas_kernels.peer_gather.mailbox import PAIR_BYTES, THREADS

SECONDS = 60
"""A thread that waits longer for a peer ends the kernel with an error of the device."""

_RECEIVE = f"""{{
.reg .pred arrived, late;
.reg .b64 start, now;
mov.u64 start, %globaltimer;
AGAIN:
ld.volatile.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
setp.eq.s32 arrived, $1, $5;
setp.eq.and.s32 arrived, $3, $5, arrived;
@arrived bra DONE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
setp.gt.s64 late, now, {SECONDS * 1_000_000_000};
@late trap;
bra AGAIN;
DONE:
}}"""


@functools.partial(jax.jit, static_argnames=("dtype", "num_devices", "launch"))
def gather_sum(
    parts: jax.Array, dtype: jnp.dtype, links: jax.Array, num_devices: int, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    """As `api.gather_sum`: parts [S, N] -> [n, N]."""
    S, N = parts.shape
    num_pairs = N * jnp.dtype(dtype).itemsize // PAIR_BYTES
    blocks, each = mailbox.blocks_of(num_pairs)
    rounded = parts.dtype != dtype

    def body(
        parts_gmem,  # [S, N]
        links_gmem,  # [LINKS] int32
        out_gmem,  # [n, N]
    ):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (plgpu.Layout.WG_SPLAT(()),))
        def exchange(_, parts, links, out, block):
            reads = _Reads(_address(parts), S, num_pairs, rounded)
            block = block.registers.flat[0]
            _emit(reads, _address(links), _address(out), block, num_devices, num_pairs, each)

        exchange(parts_gmem, links_gmem, out_gmem, lax.axis_index("block"))

    links_ref = jax.new_ref(links)
    gathered = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_devices, N), dtype),
        grid=(blocks,),
        grid_names=("block",),
        # Safe without barriers: no shared memory, and only inline code touches memory.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=launch.interpret,
        kernel_name="peer_gather",
    )(parts, links_ref)
    return gathered, links_ref[...]


def _emit(load, links, out, block, num_devices: int, num_pairs: int, each: int) -> None:
    """Code of one thread.

    Args:
      load: function that emits the loads of a pair, from its number: two words.
      links, out: addresses.
      each: pairs of a thread block.
    """
    thread = _asm("mov.u32 $0, %tid.x;", "=r", [], mlir.i32())
    rank = _load(links, 0)
    counter = _plus(links, _times(_add(block, mailbox.COUNTERS), 4))
    number = _add(_load(counter, 0), 1)
    is_zero = mlir.arith.cmpi(mlir.arith.CmpIPredicate.eq, number, _constant(0))
    number = mlir.arith.select(is_zero, _constant(2), number)  # `mailbox.number_after`
    slot = mlir.arith.andi(number, _constant(1))

    def pair_of(mailbox_address, sender, at):
        """Address of a pair, of those of this thread block."""
        index = _add(_times(slot, num_devices), sender)
        index = _add(_times(index, mailbox.BLOCKS), block)
        index = _add(_times(index, mailbox.PAIRS), at)
        return _plus(mailbox_address, _times(index, 2 * PAIR_BYTES))

    def store(sender, pair, words):
        row = _plus(out, _times(sender, num_pairs * PAIR_BYTES))
        address = _plus(row, _times(pair, PAIR_BYTES))
        _asm("st.global.v2.b32 [$0], {$1, $2};", "l,r,r", [address, *words])

    mailbox_of = lambda device: _load_address(_plus(links, _times(device, 8)), mailbox.ADDRESSES)
    peers = [mlir.arith.remui(_add(rank, i), _constant(num_devices)) for i in range(1, num_devices)]
    own, others = mailbox_of(rank), [mailbox_of(peer) for peer in peers]
    places = []  # pairs of this thread within its block, and in the message
    for first in range(0, each, THREADS):
        # Threads past the end repeat the last pair: they store the same numbers at the same places.
        at = mlir.arith.minui(_add(thread, first), _constant(each - 1))
        pair = _add(_times(block, each), at)
        places.append((at, mlir.arith.minui(pair, _constant(num_pairs - 1))))
    loaded = [load(pair) for _, pair in places]  # all before the first store, so that they overlap
    for (at, pair), words in zip(places, loaded, strict=True):
        for address in others:
            marked = [words[0], number, words[1], number]
            target = pair_of(address, rank, at)
            _asm(
                "st.volatile.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", [target, *marked]
            )
        store(rank, pair, words)
    for peer in peers:
        for at, pair in places:
            four = mlir.llvm.StructType.get_literal([mlir.i32()] * 4)
            operands = [pair_of(own, peer, at), number]
            received = _asm(_RECEIVE, "=&r,=&r,=&r,=&r,l,r", operands, four)
            words = [mlir.llvm.extractvalue(mlir.i32(), received, [i]) for i in (0, 2)]
            store(peer, pair, words)
    # The number changes after all threads have read it.
    text = "{ .reg .pred first; bar.sync 1, 128; setp.eq.s32 first, $2, 0; @first st.global.b32 [$0], $1; }"
    _asm(text, "l,r,r", [counter, number, thread])


class _Reads:
    """Loads of the sum of parts [S, N], a pair at a time."""

    def __init__(self, address, num_parts: int, num_pairs: int, rounded: bool):
        self._address, self._num_parts, self._rounded = address, num_parts, rounded
        self._pair_bytes = PAIR_BYTES * (2 if rounded else 1)
        self._part_bytes = num_pairs * self._pair_bytes

    def __call__(self, pair) -> list:
        """Two words: elements of 32 bits, or four numbers that are rounded to bfloat16."""
        count = 4 if self._rounded else 2
        loaded = []
        for part in range(self._num_parts):
            address = _plus(self._address, _times(pair, self._pair_bytes))
            address = mlir.arith.addi(address, _constant(part * self._part_bytes, _i64()))
            names = ", ".join(f"${i}" for i in range(count))
            text = f"ld.global.v{count}.b32 {{{names}}}, [${count}];"
            words = mlir.llvm.StructType.get_literal([mlir.i32()] * count)
            words = _asm(text, ",".join(["=r"] * count + ["l"]), [address], words)
            loaded.append([mlir.llvm.extractvalue(mlir.i32(), words, [i]) for i in range(count)])
        if self._num_parts == 1 and not self._rounded:
            return loaded[0]
        f32 = mlir.ir.F32Type.get()
        first, *rest = [[mlir.arith.bitcast(f32, word) for word in words] for words in loaded]
        for words in rest:
            first = [mlir.arith.addf(x, y) for x, y in zip(first, words, strict=True)]
        if not self._rounded:
            return [mlir.arith.bitcast(mlir.i32(), x) for x in first]
        # The first operand becomes the upper half.
        round_two = lambda low, high: _asm(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], mlir.i32()
        )
        return [round_two(*first[:2]), round_two(*first[2:])]


def _i64() -> Any:
    return mlir.ir.IntegerType.get_signless(64)


def _constant(value: int, type_: Any = None) -> Any:
    return mlir.constant(value, type_ or mlir.i32())


def _add(x, y) -> Any:
    return mlir.arith.addi(x, _constant(y) if isinstance(y, int) else y)


def _times(x, factor: int) -> Any:
    return mlir.arith.muli(x, _constant(factor))


def _plus(address, offset) -> Any:
    """An address behind another, by bytes of 32 bits."""
    return mlir.arith.addi(address, mlir.arith.extui(_i64(), offset))


def _address(ref) -> Any:
    """The address of an array, 64 bits."""
    return mlir.llvm.ptrtoint(_i64(), mlir.memref_ptr(ref))


def _load(address, word: int) -> Any:
    """Word `word` of 32 bits behind an address."""
    return _asm(f"ld.global.b32 $0, [$1 + {4 * word}];", "=r,l", [address], mlir.i32())


def _load_address(address, word: int) -> Any:
    """64 bits from word `word` behind an address."""
    return _asm(f"ld.global.b64 $0, [$1 + {4 * word}];", "=l,l", [address], _i64())


def _asm(text: str, constraints: str, operands: list, result: Any = None) -> Any:
    """Inline PTX, which the compiler neither moves nor removes."""
    result = result or mlir.ir.Type.parse("!llvm.void")
    return mlir.llvm.inline_asm(result, operands, text, constraints, has_side_effects=True)
