"""How many connections may be open: in all and from one address, with some reserved for health checks.

A connection is idle until the head of a request is complete, and again after the answer. When a limit is
reached, a new connection takes the place of the oldest idle one. If none is idle, it takes one of the
reserved places, where only health checks are answered.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Visit:
    """One open connection.

    Attributes:
      close: ends the connection at once.
      is_reserved: whether only health checks are answered.
      is_open: whether it has a place; False once it left or was closed for another.
    """

    address: str
    close: Callable[[], object]
    is_reserved: bool = False
    is_open: bool = True


@dataclass
class _Group:
    """Connections that count against one limit; `idle` has the oldest first."""

    most: int
    visits: set[Visit] = field(default_factory=set)
    idle: dict[Visit, None] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.visits) >= self.most


class Gate:
    """Counts connections and chooses which to close.

    Args:
      most: connections in all, the reserved ones not counted.
      most_per_address: connections of one address; of IPv6 the first 64 bits are the address.
      reserve: further connections, for health checks.
    """

    def __init__(self, *, most: int, most_per_address: int, reserve: int = 16):
        self._most_per_address = most_per_address
        self._all = _Group(most)
        self._reserved = _Group(reserve)
        self._addresses: dict[str, _Group] = {}

    @property
    def num_open(self) -> int:
        """Connections that have a place."""
        return len(self._all.visits) + len(self._reserved.visits)

    def enter(self, address: str, close: Callable[[], object]) -> Visit | None:
        """A place for a new connection, which is idle; None if there is none."""
        visit = Visit(_network(address), close)
        for group in (self._addresses.get(visit.address), self._all):
            if group is not None and group.is_full and not self._close_oldest(group):
                visit.is_reserved = True
                if self._reserved.is_full and not self._close_oldest(self._reserved):
                    return None
                break
        for group in self._groups(visit):
            group.visits.add(visit)
            group.idle[visit] = None
        return visit

    def set_idle(self, visit: Visit, is_idle: bool) -> None:
        """Says whether a connection waits for a request."""
        if not visit.is_open:
            return
        for group in self._groups(visit):
            if is_idle:
                group.idle.setdefault(visit)
            else:
                group.idle.pop(visit, None)

    def leave(self, visit: Visit) -> None:
        """Frees the place of a connection; a second time does nothing."""
        if not visit.is_open:
            return
        visit.is_open = False
        for group in self._groups(visit):
            group.visits.discard(visit)
            group.idle.pop(visit, None)
        if not visit.is_reserved and not self._addresses[visit.address].visits:
            del self._addresses[visit.address]

    def close_idle(self) -> bool:
        """Closes the oldest idle connection, for its descriptor; False if none is idle."""
        return self._close_oldest(self._all) or self._close_oldest(self._reserved)

    def _groups(self, visit: Visit) -> tuple[_Group, ...]:
        if visit.is_reserved:
            return (self._reserved,)
        of_address = self._addresses.setdefault(visit.address, _Group(self._most_per_address))
        return (self._all, of_address)

    def _close_oldest(self, group: _Group) -> bool:
        visit = next(iter(group.idle), None)
        if visit is None:
            return False
        self.leave(visit)
        visit.close()
        return True


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
