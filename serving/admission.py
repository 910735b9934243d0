"""Admission: checks requests against limits, and holds those that are open."""

import time
from collections.abc import Callable, Collection

from peagle_jax import ConfigError, SamplingParams
from serving.errors import Code, ServiceError, invalid
from serving.limits import Limits
from serving.params import check_room
from serving.stream import Ask, Stream


class Admission:
    """The limits of a request, and the requests that have been accepted and have not ended.

    Args:
      limits: see `Limits`.
      validate: raises `ConfigError` for a prompt and parameters that the engine cannot run.
      max_model_len: tokens of prompt and output together.
    """

    def __init__(
        self,
        limits: Limits,
        validate: Callable[[list[int], SamplingParams], None],
        *,
        max_model_len: int,
    ):
        self.limits, self._validate, self._max_model_len = limits, validate, max_model_len
        self._streams: dict[int, Stream] = {}
        self._by_id: dict[tuple[str, str], Stream] = {}
        """By caller and request id: a caller cannot see the requests of others."""

    @property
    def num_open(self) -> int:
        """Requests that have been accepted and have not ended."""
        return len(self._streams)

    @property
    def streams(self) -> Collection[Stream]:
        """All open requests, oldest first; a copy."""
        return list(self._streams.values())

    def check(self, ask: Ask) -> None:
        """Refuses a request that cannot run.

        Raises:
          ServiceError: INVALID_ARGUMENT, ALREADY_EXISTS or DEADLINE_EXCEEDED.
        """
        if (ask.caller, ask.request_id) in self._by_id:
            rule = f"request_id {ask.request_id!r} is running; ids must be unique while they run"
            raise ServiceError(Code.ALREADY_EXISTS, rule)
        self.check_count(ask)
        field = ask.spelling.get("prompt", "prompt")
        check_room(len(ask.prompt), field=field, max_model_len=self._max_model_len)
        least = self.limits.min_priority
        if ask.priority < least:
            rule = f"{ask.priority} must be {least} or more (--min-priority)"
            raise invalid(ask.spelling.get("priority", "priority"), rule)
        try:
            self._validate(ask.prompt, ask.params)
        except ConfigError as error:
            raise invalid(ask.spelling.get(error.field, error.field), error.rule) from error
        now = time.monotonic()
        if ask.deadline is not None and ask.deadline <= now:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED, "the deadline had passed when the request came"
            )
        latest = self.deadline(ask.arrival)
        if latest is not None and latest <= now:
            raise late(now - ask.arrival)

    def deadline(self, arrival: float, own: float | None = None) -> float | None:
        """When a request must have ended, as `time.monotonic()`; None without a limit.

        Args:
          arrival: when it arrived.
          own: the client's own deadline.
        """
        most = self.limits.max_request_seconds
        latest = [arrival + most] if most else []
        return min(latest + ([] if own is None else [own]), default=None)

    def add(self, stream: Stream) -> None:
        """Counts an accepted request."""
        self._streams[stream.number] = stream
        self._by_id[stream.ask.caller, stream.ask.request_id] = stream

    def remove(self, stream: Stream) -> None:
        """Forgets a request that has ended."""
        del self._streams[stream.number]
        key = stream.ask.caller, stream.ask.request_id
        if self._by_id.get(key) is stream:
            del self._by_id[key]

    def get(self, number: int) -> Stream | None:
        """The open request of a number."""
        return self._streams.get(number)

    def find(self, caller: str, request_id: str) -> Stream | None:
        """The open request of a caller, by its id."""
        return self._by_id.get((caller, request_id))

    def check_count(self, ask: Ask) -> None:
        """Refuses a number of sequences that no request may have: INVALID_ARGUMENT."""
        n, most, rule = ask.n, self.limits.max_n, None
        if not 1 <= n <= most:
            rule = f"{n} must lie between 1 and {most}"
        elif n > 1 and ask.params.temperature == 0:
            rule = f"{n} greedy sequences would be equal; set a temperature, or n to 1"
        if rule is not None:
            raise invalid(ask.spelling.get("n", "n"), rule)


def late(seconds: float) -> ServiceError:
    """DEADLINE_EXCEEDED: the time limit passed before the engine received the request."""
    return ServiceError(
        Code.DEADLINE_EXCEEDED,
        f"the time was up after {seconds:.3g} s, before the request came to the engine",
    )
