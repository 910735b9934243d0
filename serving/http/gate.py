"""Limits on open HTTP connections: in all and per address, with some places reserved for health checks.

A connection is idle until the head of a request is complete, and again after the answer. When a limit is
reached, a new connection replaces an idle one, in this order:

1. the one that has been idle longest, unless it is young: it has sent no request yet, and was accepted less
   than `grace_seconds` ago. So a health probe has time to send its request during a burst of connections;
2. the oldest idle connection of the same address: who opens too many connections loses its own;
3. the oldest idle connection that has had an answer;
4. the oldest young connection.

If no connection is idle, the new one takes a reserved place, where only health checks are answered.
"""

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Visit:
    """One open connection.

    Attributes:
      close: ends the connection at once.
      is_reserved: whether only health checks are answered.
      is_open: whether it has a place; False once it left or was closed for another.
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
    visits: set[Visit] = field(default_factory=set)
    silent: dict[Visit, None] = field(default_factory=dict)
    idle: dict[Visit, None] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.visits) >= self.most

    def add(self, visit: Visit) -> None:
        self.visits.add(visit)
        self.silent[visit] = None

    def remove(self, visit: Visit) -> None:
        self.visits.discard(visit)
        self.set_busy(visit)

    def set_idle(self, visit: Visit) -> None:
        (self.idle if visit.has_sent else self.silent).setdefault(visit)

    def set_busy(self, visit: Visit) -> None:
        self.silent.pop(visit, None)
        self.idle.pop(visit, None)

    def oldest(self) -> Visit | None:
        """The connection that has been idle longest."""
        first = [next(iter(kind)) for kind in (self.silent, self.idle) if kind]
        return min(first, key=lambda visit: visit.idle_since, default=None)

    def oldest_of(self, address: str) -> Visit | None:
        """The connection of an address that has been idle longest."""
        mine = (visit for kind in (self.silent, self.idle) for visit in kind)
        mine = (visit for visit in mine if visit.address == address)
        return min(mine, key=lambda visit: visit.idle_since, default=None)


class Gate:
    """Counts connections and chooses which to close.

    Args:
      most: connections in all, the reserved ones not counted.
      most_per_address: connections of one address; of IPv6 the first 64 bits are the address.
      reserve: further connections, for health checks.
      grace_seconds: how long a connection that has sent no request yet is spared.
      clock: seconds, never going back.
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
        """Connections that have a place."""
        return len(self._all.visits) + len(self._reserved.visits)

    def enter(self, address: str, close: Callable[[], object]) -> Visit | None:
        """A place for a new connection, which is idle; None if there is none."""
        visit = Visit(_network(address), close, idle_since=self._clock())
        for group in (self._addresses.get(visit.address), self._all):
            if group is not None and group.is_full and not self._replace(group, visit.address):
                visit.is_reserved = True
                if self._reserved.is_full and not self._replace(self._reserved, visit.address):
                    return None
                break
        for group in self._groups(visit):
            group.add(visit)
        return visit

    def set_idle(self, visit: Visit, is_idle: bool) -> None:
        """Records whether a connection waits for a request."""
        if not visit.is_open:
            return
        groups = self._groups(visit)
        if not is_idle:
            visit.has_sent = True
            for group in groups:
                group.set_busy(visit)
        elif visit not in groups[0].silent and visit not in groups[0].idle:
            visit.idle_since = self._clock()
            for group in groups:
                group.set_idle(visit)

    def leave(self, visit: Visit) -> None:
        """Frees the place of a connection; a second time does nothing."""
        if not visit.is_open:
            return
        visit.is_open = False
        for group in self._groups(visit):
            group.remove(visit)
        if not visit.is_reserved and not self._addresses[visit.address].visits:
            del self._addresses[visit.address]

    def close_idle(self) -> bool:
        """Closes an idle connection, for its descriptor; False if none is idle."""
        return self._replace(self._all, None) or self._replace(self._reserved, None)

    def _groups(self, visit: Visit) -> tuple[_Group, ...]:
        if visit.is_reserved:
            return (self._reserved,)
        of_address = self._addresses.setdefault(visit.address, _Group(self._most_per_address))
        return (self._all, of_address)

    def _replace(self, group: _Group, address: str | None) -> bool:
        """Closes a connection of the group for a new one from `address`; False if none is idle."""
        visit = group.oldest()
        if visit is None:
            return False
        if self._is_young(visit):
            visit = self._oldest_of(address, group) or next(iter(group.idle), visit)
        self.leave(visit)
        visit.close()
        return True

    def _is_young(self, visit: Visit) -> bool:
        return not visit.has_sent and self._clock() - visit.idle_since < self._grace_seconds

    def _oldest_of(self, address: str | None, group: _Group) -> Visit | None:
        if address is None:
            return None
        if group is self._reserved:  # a few, and no group of their address counts them
            return group.oldest_of(address)
        own = self._addresses.get(address)
        return None if own is None else own.oldest()


def _network(address: str) -> str:
    """What counts as one address: one customer has 2**64 addresses of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
