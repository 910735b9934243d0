"""Limits on open HTTP connections: in all and per address, with some places reserved for health
checks.

A connection is idle until the head of a request is complete, and again after the answer. When a
limit is reached, a new connection replaces an idle one, in this order:

1. the one that has been idle longest, unless it is young: it has sent no request yet, and was
   accepted less than `grace_seconds` ago. So a health probe has time to send its request during a
   burst of connections;
2. the oldest idle connection of the same address, so that a client with too many connections loses
   its own;
3. the oldest idle connection that has had an answer;
4. the oldest young connection.

If no connection is idle, the new one takes a reserved place, where only health checks are answered.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.networks import network


@dataclass(eq=False)
class Slot:
    """One open connection.

    Attributes:
      close: ends the connection at once.
      is_reserved: whether only health checks are answered.
      is_open: whether it counts; False after it was closed, by itself or for another connection.
      idle_since: when it was accepted, or became idle again.
      has_sent: whether it has sent the head of a request.
    """

    address: str
    close: Callable[[], object]
    is_reserved: bool = False
    is_open: bool = True
    idle_since: float = 0.0
    has_sent: bool = False


@dataclass
class _Group:
    """Connections that count against one limit.

    Attributes:
      most: the limit.
      silent: idle connections that have sent no request yet, oldest first.
      idle: idle connections after an answer, oldest first.
    """

    most: int
    slots: set[Slot] = field(default_factory=set)
    silent: dict[Slot, None] = field(default_factory=dict)
    idle: dict[Slot, None] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.slots) >= self.most

    def add(self, slot: Slot) -> None:
        self.slots.add(slot)
        self.silent[slot] = None

    def remove(self, slot: Slot) -> None:
        self.slots.discard(slot)
        self.set_busy(slot)

    def set_idle(self, slot: Slot) -> None:
        (self.idle if slot.has_sent else self.silent).setdefault(slot)

    def set_busy(self, slot: Slot) -> None:
        self.silent.pop(slot, None)
        self.idle.pop(slot, None)

    def oldest(self) -> Slot | None:
        """The connection that has been idle longest."""
        first = [next(iter(kind)) for kind in (self.silent, self.idle) if kind]
        return min(first, key=lambda slot: slot.idle_since, default=None)

    def oldest_of(self, address: str) -> Slot | None:
        """The connection of an address that has been idle longest."""
        mine = (slot for kind in (self.silent, self.idle) for slot in kind)
        mine = (slot for slot in mine if slot.address == address)
        return min(mine, key=lambda slot: slot.idle_since, default=None)


class Gate:
    """Counts connections and chooses which to close.

    Args:
      most: connections in all, the reserved ones not counted.
      most_per_address: connections of one address; of IPv6 the first 64 bits are the address.
      reserve: further connections, for health checks.
      grace_seconds: how long a connection that has sent no request yet is spared.
      clock: a clock that never goes back, in seconds.
    """

    def __init__(
        self,
        *,
        most: int,
        most_per_address: int,
        reserve: int = 16,
        grace_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._most_per_address = most_per_address
        self._grace_seconds, self._clock = grace_seconds, clock
        self._all = _Group(most)
        self._reserved = _Group(reserve)
        self._addresses: dict[str, _Group] = {}

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._all.slots) + len(self._reserved.slots)

    def enter(self, address: str, close: Callable[[], object]) -> Slot | None:
        """Admits a new connection, which is idle; None if no connection can be closed for it."""
        slot = Slot(network(address), close, idle_since=self._clock())
        for group in (self._addresses.get(slot.address), self._all):
            if group is not None and group.is_full and not self._replace(group, slot.address):
                slot.is_reserved = True
                if self._reserved.is_full and not self._replace(self._reserved, slot.address):
                    return None
                break
        for group in self._groups(slot):
            group.add(slot)
        return slot

    def set_idle(self, slot: Slot, is_idle: bool) -> None:
        """Records whether a connection waits for a request."""
        if not slot.is_open:
            return
        groups = self._groups(slot)
        if not is_idle:
            slot.has_sent = True
            for group in groups:
                group.set_busy(slot)
        elif slot not in groups[0].silent and slot not in groups[0].idle:
            slot.idle_since = self._clock()
            for group in groups:
                group.set_idle(slot)

    def leave(self, slot: Slot) -> None:
        """Stops counting a connection that is closed; a second call does nothing."""
        if not slot.is_open:
            return
        slot.is_open = False
        for group in self._groups(slot):
            group.remove(slot)
        if not slot.is_reserved and not self._addresses[slot.address].slots:
            del self._addresses[slot.address]

    def close_idle(self) -> bool:
        """Closes an idle connection, for its descriptor; False if none is idle."""
        return self._replace(self._all, None) or self._replace(self._reserved, None)

    def _groups(self, slot: Slot) -> tuple[_Group, ...]:
        if slot.is_reserved:
            return (self._reserved,)
        of_address = self._addresses.setdefault(slot.address, _Group(self._most_per_address))
        return (self._all, of_address)

    def _replace(self, group: _Group, address: str | None) -> bool:
        """Closes a connection of the group for a new one from `address`; False if none is idle."""
        slot = group.oldest()
        if slot is None:
            return False
        if self._is_young(slot):
            slot = self._oldest_of(address, group) or next(iter(group.idle), slot)
        self.leave(slot)
        slot.close()
        return True

    def _is_young(self, slot: Slot) -> bool:
        return not slot.has_sent and self._clock() - slot.idle_since < self._grace_seconds

    def _oldest_of(self, address: str | None, group: _Group) -> Slot | None:
        if address is None:
            return None
        if group is self._reserved:  # not counted by address; there are few of them
            return group.oldest_of(address)
        own = self._addresses.get(address)
        return None if own is None else own.oldest()
