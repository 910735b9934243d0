"""Latencies of requests as seen by the client, and their statistics."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from peagle_jax.engine.host.stats import Acceptance
from serving.protos import peagle_v1_pb2 as pb

LATENCIES = ("ttft", "tpot", "e2e")
_PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True)
class Outcome:
    """One request. Times are `time.perf_counter()`; `first` and `last` are arrivals of tokens.

    `code` is its final gRPC status. `acceptance` comes from the server's usage, which only a
    complete stream contains. `counted` is the server's number of tokens where their ids are not
    sent. `arrivals` are those of all messages with tokens.
    """

    sent: float
    code: str = ""
    first: float | None = None
    last: float | None = None
    tokens: Sequence[int] = field(default_factory=lambda: array("i"))
    counted: int | None = None
    arrivals: array = field(default_factory=lambda: array("d"))
    acceptance: pb.Acceptance | None = None

    def arrive(self, now: float) -> None:
        """Notes a message with tokens."""
        self.first = self.first or now
        self.last = now
        self.arrivals.append(now)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.counted is None else self.counted

    def latency(self, name: str) -> float | None:
        """Milliseconds of "ttft", "tpot" or "e2e"; None if undefined.

        With speculation several tokens arrive per message, so time per output token counts tokens,
        not messages: (e2e - ttft) / (tokens - 1).
        """
        if self.first is None:
            return None
        if name == "tpot":
            rest = self.num_tokens - 1
            return 1e3 * (self.last - self.first) / rest if rest > 0 else None
        return 1e3 * ((self.first if name == "ttft" else self.last) - self.sent)

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether the request succeeded within all limits (milliseconds by name of a latency)."""
        latencies = {name: self.latency(name) for name in limits}
        # A request of one token has no tpot, so it meets any tpot limit.
        within = (latencies[name] is None or latencies[name] <= limits[name] for name in limits)
        return self.code == "OK" and all(within)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 90th and 99th percentile, as "p50" and so on; None without values."""
    if not values:
        return None
    found = np.percentile(values, _PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(_PERCENTILES, found, strict=True)}


def figures(outcomes: Sequence[Outcome], seconds: float, limits: Mapping[str, float]) -> dict:
    """The result fields of a row; latencies are of successful requests.

    Args:
      seconds: wall time from the first request to the last end.
      limits: of `Outcome.meets`, for goodput; if empty, the row has no goodput.
    """
    good = [outcome for outcome in outcomes if outcome.code == "OK"]
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    counts = Acceptance.of(o.acceptance for o in outcomes if o.acceptance is not None)
    row = {
        "requests": len(outcomes),
        "codes": dict(sorted(Counter(outcome.code for outcome in outcomes).items())),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
    }
    for name in LATENCIES:
        values = [outcome.latency(name) for outcome in good]
        row[f"{name}_ms"] = percentiles([value for value in values if value is not None])
    if limits:
        row["goodput_limits_ms"] = dict(limits)
        row["goodput"] = sum(outcome.meets(limits) for outcome in outcomes) / seconds
    return row | {
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_length": counts.length,
        "acceptance_per_position": list(counts.rates),
    }


def gap_figures(outcomes: Sequence[Outcome], begin: float) -> dict:
    """Row fields about the milliseconds between two messages of a stream, over all streams.

    `gap_max_at` is the end of the longest one in seconds after `begin`, which is
    `time.perf_counter()`. Without two messages of one stream all are None.
    """
    gaps = [np.diff(np.asarray(outcome.arrivals)) for outcome in outcomes]
    ends = [np.asarray(outcome.arrivals)[1:] for outcome in outcomes]
    if not (some := 1e3 * np.concatenate([np.zeros(0), *gaps])).size:
        return {"gap_ms": None, "gap_max_at": None}
    longest = int(some.argmax())
    p50, p99 = np.percentile(some, (50, 99))
    return {
        "gap_ms": {"p50": float(p50), "p99": float(p99), "max": float(some[longest])},
        "gap_max_at": float(np.concatenate(ends)[longest] - begin),
    }
