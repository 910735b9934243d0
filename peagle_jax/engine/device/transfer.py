"""Plans to the device and outputs to the host: one transfer per call in each direction.

All leaves of a tree travel as one array of int32, because every transfer costs the host tens of
microseconds, whatever its size. The buffers that a program reads and writes keep their addresses
over all calls (see `programs`): a plan is copied into resident arrays, and the host reads a copy of
the output, which the program packs.
"""

import atexit
import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from peagle_jax.method.plan import DecodePlan, PrefillPlan
from peagle_jax.method.step import StepOutput


class Layout:
    """Where the leaves of a tree lie in its packed bits.

    Args:
      like: a tree of arrays, or of their shapes and dtypes.
    """

    def __init__(self, like):
        leaves, self._structure = jax.tree.flatten(like)
        ends = list(itertools.accumulate(leaf.size for leaf in leaves))
        self._parts = [
            (end - leaf.size, end, leaf.shape, leaf.dtype)
            for leaf, end in zip(leaves, ends, strict=True)
        ]
        self.size = ends[-1]

    def split(self, bits: np.ndarray):
        """The tree of views of bits [size] int32."""
        leaves = [bits[a:b].view(dtype).reshape(shape) for a, b, shape, dtype in self._parts]
        return self._structure.unflatten(leaves)


class Resident:
    """Device buffers of one program that keep their addresses over all calls: plan, mask and
    output.

    Args:
      idle: a host plan of padding rows, for the shapes.
      mask_shape: of the mask, see `plan`; None: the program takes none, and no constrained rows.
      output: shapes and dtypes of the program's output.
      place: puts a tree of arrays where the program runs.
    """

    def __init__(
        self,
        idle: PrefillPlan | DecodePlan,
        mask_shape: tuple[int, ...] | None,
        output: StepOutput,
        place: Callable = lambda tree: tree,
    ):
        self._takes_mask = mask_shape is not None
        self.layout = Layout(output)
        # The output's bits, as `pack_on_device` packs them.
        self.bits = place(jnp.zeros(self.layout.size, jnp.int32))
        # Copies, because the plan is donated.
        self.plan = place(jax.tree.map(jnp.array, _narrow(idle, self._takes_mask)))
        self.mask = place(jnp.zeros(mask_shape, jnp.int32)) if self._takes_mask else None
        self._last, self._uploaded = idle, pack(_narrow(idle, self._takes_mask))

    @staticmethod
    def shapes(
        idle: PrefillPlan | DecodePlan,
        mask_shape: tuple[int, ...] | None,
        output: StepOutput,
        place: Callable = lambda tree: tree,
    ) -> tuple:
        """Shapes of plan, mask (None without one) and output of these arguments, as operands of the
        program."""
        spec = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))
        plan = jax.tree.map(spec, _narrow(idle, mask_shape is not None))
        mask = None if mask_shape is None else jax.ShapeDtypeStruct(mask_shape, jnp.int32)
        return place((plan, mask, jax.ShapeDtypeStruct((Layout(output).size,), jnp.int32)))

    def compile(self) -> None:
        """Compiles the programs of the transfers: `jax.jit` does so on their first call."""
        self.plan = _unpack_into(self.plan, self._uploaded)
        if self.mask is not None:
            self.mask = _unpack_into(self.mask, np.zeros(self.mask.size, np.int32))
        _copy(self.bits)

    def upload(self, plan: PrefillPlan | DecodePlan, mask: np.ndarray | None = None) -> None:
        """Overwrites plan and mask with those of the host. A plan that lies there is not sent
        again; None keeps the mask, which no row reads then."""
        if plan is not self._last:
            bits = pack(_narrow(plan, self._takes_mask))
            if self._uploaded is None or not np.array_equal(bits, self._uploaded):
                # An interrupt here leaves unknown what lies on the device.
                self._last = self._uploaded = None
                self.plan = _unpack_into(self.plan, bits)
                self._uploaded = bits
            self._last = plan
        if mask is not None:
            self.mask = _unpack_into(self.mask, pack(mask))


_EXIT_SECONDS = 30.0
_unread: set["Result"] = set()


@atexit.register
def _wait_for_unread() -> None:
    """Waits for the calls in flight at the exit of the interpreter.

    The end of `copy_to_host_async` runs Python in a thread of XLA, and aborts the process if the
    interpreter has gone by then. A device that hangs delays the exit by `_EXIT_SECONDS`.
    """
    until = time.monotonic() + _EXIT_SECONDS
    while _unread and time.monotonic() < until:
        for result in list(_unread):
            with contextlib.suppress(Exception):  # a call that failed has ended
                if not result.is_ready():
                    continue
                result.fetch()
            _unread.discard(result)
        time.sleep(0.001)


class Result:
    """The output of a call during its transfer to the host: one device copy, one transfer.

    Args:
      bits: the output, packed by `pack_on_device`; the next call overwrites it.
      layout: of the output.
    """

    def __init__(self, bits: jax.Array, layout: Layout):
        self._bits, self._layout = _copy(bits), layout
        _unread.add(self)
        self._bits.copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether the call has ended."""
        return self._bits.is_ready()

    def fetch(self) -> StepOutput:
        """The output as numpy arrays. Blocks until the call has ended."""
        output = self._layout.split(np.asarray(self._bits))
        _unread.discard(self)
        return output


def _narrow(plan: PrefillPlan | DecodePlan, takes_mask: bool) -> PrefillPlan | DecodePlan:
    """The plan without what only constrained and timed rows need, if the program takes no mask."""
    return plan if takes_mask else plan._replace(constrained=None, forced=None, newest=None)


def pack(plan) -> np.ndarray:
    """[n] int32: the bits of all leaves of a host plan; of a single array a view, since masks are
    large."""
    parts = [np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(plan)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@partial(jax.jit, donate_argnums=0)
def _unpack_into(plan, packed: jax.Array):
    """Overwrites the leaves of `plan` (donated) with the values that `pack` packed, [n] int32."""
    write = lambda leaf, value: leaf.at[...].set(value)
    return jax.tree.map(write, plan, unpack(packed, plan))


def unpack(packed: jax.Array, like):
    """The tree that `pack` packed, [n] int32, with the structure, shapes and dtypes of `like`."""
    read = lambda leaf, bits: lax.bitcast_convert_type(bits, leaf.dtype)
    return jax.tree.map(read, like, _split_like(packed, like))


@jax.jit
def _copy(bits: jax.Array) -> jax.Array:
    return jnp.copy(bits)


def pack_on_device(tree) -> jax.Array:
    """[n] int32: the bits of all leaves."""
    bits = lambda leaf: lax.bitcast_convert_type(leaf, jnp.int32).ravel()
    return jnp.concatenate([bits(leaf) for leaf in jax.tree.leaves(tree)])


def _split_like(bits, like):
    """Splits packed bits [n] int32 into a tree with the structure and shapes of `like`, still
    int32."""
    leaves, structure = jax.tree.flatten(like)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [
        bits[e - leaf.size : e].reshape(leaf.shape) for e, leaf in zip(ends, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)
