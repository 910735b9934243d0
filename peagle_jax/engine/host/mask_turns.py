"""Which constrained requests go in a round, so that costly masks hold up no others for long."""

from collections.abc import Sequence

from peagle_jax.engine.host.pages import Salt
from peagle_jax.engine.host.request import Request

SECONDS = 0.01
"""Longest time of all cores for the masks of a round that others wait for: about a round of a large
model. One request whose masks take longer may come on top."""


class MaskTurns:
    """Divides the time for masks among callers: each has its share of every round, and saves it for
    costly requests.

    A request that sits out loses only time: its text does not depend on who else is in a round.
    """

    def __init__(self):
        self._credit: dict[Salt, float] = {}
        """Seconds of processor time that a caller has left."""
        self._num_rounds = 0
        self._last: dict[int, int] = {}
        """The last round of a request, by its number."""

    def choose(
        self, requests: Sequence[Request], *, num_draft: int, has_others: bool
    ) -> Sequence[Request]:
        """Those of the constrained requests that go in the next round, at least one of them.

        Args:
          requests: of which at least one.
          num_draft: most drafts of the round, each with a mask.
          has_others: whether requests without constraint are in the round.
        """
        costs = {r.number: r.matcher.seconds * (1 + min(num_draft, r.num_draft)) for r in requests}
        limit = SECONDS * requests[0].matcher.threads.most
        callers = {_caller(request) for request in requests}
        if sum(costs.values()) <= limit or not (has_others or len(callers) > 1):
            return requests
        self._num_rounds += 1
        self._last = {r.number: self._last.get(r.number, 0) for r in requests}
        most = {
            caller: max(costs[r.number] for r in requests if _caller(r) == caller)
            for caller in callers
        }
        self._credit = {
            caller: min(
                self._credit.get(caller, 0.0) + limit / len(callers), max(limit, most[caller])
            )
            for caller in callers
        }
        chosen = self._affordable(requests, costs, limit)
        for request in chosen:
            self._credit[_caller(request)] -= costs[request.number]
            self._last[request.number] = self._num_rounds
        return [request for request in requests if request in chosen]

    def _affordable(
        self, requests: Sequence[Request], costs: dict[int, float], limit: float
    ) -> list[Request]:
        """What the callers can pay, those that waited longest first."""
        order = sorted(requests, key=lambda request: self._last[request.number])
        credit, left, has_large = dict(self._credit), limit, False
        chosen: list[Request] = []
        for request in order:
            cost = costs[request.number]
            fits = not has_large if cost > limit else cost <= left
            if not fits or cost > credit[_caller(request)]:
                continue
            chosen.append(request)
            credit[_caller(request)] -= cost
            has_large |= cost > limit
            left -= cost if cost <= limit else 0.0
        return chosen or order[:1]


def _caller(request: Request) -> Salt:
    """Who asks: a salt's first part; a client chooses the others."""
    return request.salt[:1]
