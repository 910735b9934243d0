"""The devices that run a step together, while it is traced, and the step's collectives.

The step is one program under `shard_map`, so layers see the arrays of one device. They add what
devices computed in parts by `gathered` and an ordered sum, never by `psum`: its order of additions
depends on the size of the message, so a row's bits would depend on the other rows of its batch.
Without a partition every function here is the identity, and a program for one device has no
operation more.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.moe.api import Mixture
from pallas_kernels.peer_gather import api as peer_gather

AXIS = "model"
"""Name of the mesh axis."""


class Messages:
    """The messages that a program sends to mailboxes while it is traced, one after the other.

    Attributes:
      links: int32 [LINKS], the device's table after the messages so far (`peer_gather.mailbox`).
    """

    def __init__(self, links: jax.Array):
        self.links = links
        self._trace = jax.extend.core.get_opaque_trace_state()

    def gather_sum(self, parts: jax.Array, dtype: jnp.dtype) -> jax.Array | None:
        """`peer_gather.gather_sum`; None where parts are no message: too large, or `is_nested`."""
        if self.is_nested or peer_gather.refusal(parts, dtype):
            return None
        sums, self.links = peer_gather.gather_sum(
            parts, dtype, self.links, num_devices=size(), axis=AXIS
        )
        return sums

    def gather_mixture(self, mixture: Mixture, num_rows: int) -> jax.Array | None:
        """`peer_gather.gather_mixture`; None as above."""
        if self.is_nested or peer_gather.mixture_refusal(mixture, num_rows):
            return None
        sums, self.links = peer_gather.gather_mixture(
            mixture, num_rows, self.links, num_devices=size(), axis=AXIS
        )
        return sums

    @property
    def is_nested(self) -> bool:
        """Whether a branch or a loop of the program is traced, which has a table of its own."""
        return jax.extend.core.get_opaque_trace_state() != self._trace


def switch[Tree](index: jax.Array, branches: Sequence[Callable[[], Tree]]) -> Tree:
    """`lax.switch(index, branches)`, whose branches may send messages: each takes the table and
    returns the next one.

    Args:
      index: [] int32, equal on all devices. A device in another branch than its peers would wait
        for their messages.
    """
    messages = dispatch.trace().messages
    if messages is None or messages.is_nested:
        return lax.switch(index, branches)

    sending = [functools.partial(_sending, branch) for branch in branches]
    result, messages.links = lax.switch(index, sending, messages.links)
    return result


def repeat[Tree](count: int, body: Callable[[jax.Array, Tree], Tree], carry: Tree) -> Tree:
    """`lax.fori_loop(0, count, body, carry)`, whose body may send messages: each run of it takes
    the table and returns the next one."""
    messages = dispatch.trace().messages
    if messages is None or messages.is_nested:
        return lax.fori_loop(0, count, body, carry)

    sending = lambda i, carried: _sending(functools.partial(body, i, carried[0]), carried[1])
    result, messages.links = lax.fori_loop(0, count, sending, (carry, messages.links))
    return result


def _sending[Tree](work: Callable[[], Tree], links: jax.Array) -> tuple[Tree, jax.Array]:
    """What `work()` returns, and the table after the messages that it sends."""
    own = Messages(links)
    with over(size(), own):
        return work(), own.links


def over(num_devices: int, messages: Messages | None = None) -> AbstractContextManager[None]:
    """Traces for `num_devices` devices along `AXIS`; 1: for arrays that are whole.

    Args:
      messages: gathers arrays where it can; XLA's collectives gather the others.
    """
    return dispatch.traced(num_devices=num_devices, messages=messages)


def size() -> int:
    """Number of devices that the step is traced for."""
    return dispatch.trace().num_devices


def rank() -> jax.Array:
    """[] int32, number of the device that runs, 0..size-1."""
    return lax.axis_index(AXIS)


def gathered(x: jax.Array) -> jax.Array:
    """The arrays of all devices by rank: [...] -> [n, ...]. Moves bytes only."""
    if dispatch.trace().messages is None or not (missing := -x.nbytes % peer_gather.MULTIPLE):
        return _gathered_sum(x[None], x.dtype)
    padded = jnp.pad(x.reshape(-1), (0, missing // x.dtype.itemsize))
    return _gathered_sum(padded[None], x.dtype)[:, : x.size].reshape(-1, *x.shape)


def _gathered_sum(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sums of the devices' parts [parts, ...] in `dtype`, by rank: [n, ...]."""
    messages = dispatch.trace().messages
    sums = None if messages is None else messages.gather_sum(parts, dtype)
    return lax.all_gather(add_in_order(parts).astype(dtype), AXIS) if sums is None else sums


def total(x: jax.Array) -> jax.Array:
    """The sum of the devices' arrays, added by ascending rank on every device."""
    return x if size() == 1 else add_in_order(gathered(x))


def parts_of_all(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One part of each device: partial sums float32 [parts, ...] -> [n, ...] in `dtype`.

    A device adds its own parts first and rounds once, which halves the bytes of bfloat16.
    """
    return parts if size() == 1 else _gathered_sum(parts, dtype)


def mixtures_of_all(mixture: Mixture, num_rows: int) -> jax.Array:
    """The devices' own sums `mixture.added(num_rows)`, by rank: [n, R, D]."""
    messages = dispatch.trace().messages
    sums = None if messages is None else messages.gather_mixture(mixture, num_rows)
    return gathered(mixture.added(num_rows)) if sums is None else sums
