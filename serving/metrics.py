"""Prometheus metrics: vLLM's names, which load tools and dashboards read, and our own.

Counters of the engine are read from its last `Load` at each scrape; only latencies and request
counts are kept here.
"""

import bisect
import collections
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from peagle_jax import EngineConfig
from peagle_jax.engine.host.stats import Acceptance, DeviceMemory
from serving.errors import Code, ServiceError
from serving.messages import Event, Load, Tokens
from serving.stream import Stream

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OPEN_REQUESTS = "peagle:open_requests"
_REMEMBERED = 64  # ends of requests that the retry time is estimated from

_LATENCIES = {
    "time_to_first_token": ("Arrival to first token.", _SECONDS),
    "inter_token_latency": ("Between a request's rounds that gave it tokens.", _PER_TOKEN),
    "request_time_per_output_token": ("After the first token, per token.", _PER_TOKEN),
    "e2e_request_latency": ("Arrival to end.", _SECONDS),
    "request_queue_time": ("Arrival to first prefill.", _SECONDS),
    "request_prefill_time": ("First prefill to first token.", _SECONDS),
    "request_decode_time": ("First token to end.", _SECONDS),
    "request_inference_time": ("First prefill to end.", _SECONDS),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of requests that ended.", ()),
    "vllm:prompt_tokens_cached": ("Those of them that the prefix cache had.", ()),
    "vllm:generation_tokens": ("Tokens generated.", ()),
    "vllm:request_success": ("Sequences that ended, by reason.", ("finished_reason",)),
    "vllm:admission_rejections": ("Requests refused for load: full queue, draining.", ("reason",)),
    "peagle:requests": ("Requests by protocol and gRPC status.", ("protocol", "code")),
}


class Metrics:
    """All metrics of the server, in a registry of their own.

    Args:
      model: what clients call the model.
      config: sizes of the engine.
      load: what the engine holds.
      num_open: requests accepted and not yet ended.
      memory: of each device that reports it, by rank.
    """

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig,
        load: Callable[[], Load],
        num_open: Callable[[], int],
        memory: Callable[[], Mapping[int, DeviceMemory]] = dict,
    ):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        names = tuple(self._labels)
        self._counters = {
            name: Counter(name, text, names + labels, registry=self.registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._latencies = {
            name: Histogram(f"vllm:{name}_seconds", text, self._labels, buckets)
            for name, (text, buckets) in _LATENCIES.items()
        }
        # vLLM's name for this histogram ends in _total.
        self._iteration = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens a round gave to all requests.",
            self._labels,
            _TOKENS,
        )
        self._histograms = [*self._latencies.values(), self._iteration]
        for histogram in self._histograms:
            self.registry.register(histogram)
        self._num_open = num_open
        self.registry.register(_EngineCollector(self._labels, config, load, num_open, memory))
        self._ends: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._last_tokens: dict[object, float] = {}
        self._begin_counters()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def round(self, events: Sequence[Event], num_tokens: int = 0) -> None:
        """Counts the events of a device call. Its rounds have equal shares of the time since the
        call before.

        Args:
          num_tokens: what the call gave to all requests of the engine.
        """
        now, last = time.monotonic(), self._last_tokens
        outputs = [one for one in events if isinstance(one, Tokens)]
        rounds = collections.Counter([one.key for one in outputs if one.tokens])
        # Most sequences had their tokens at the same time, so their gaps are observed at once.
        gaps: dict[float, int] = {}
        for key, number in rounds.items():
            before = last.get(key)
            is_first = before is None
            gap = 0.0 if is_first else (now - before) / number
            gaps[gap] = gaps.get(gap, 0) + number - is_first
        for gap, times in gaps.items():
            if times:
                self._latencies["inter_token_latency"].observe(gap, times)
        for one in outputs:
            if one.request is None:
                last[one.key] = now
            else:
                last.pop(one.key, None)
        total = sum([len(one.tokens) for one in outputs])
        if total:
            self._count("vllm:generation_tokens", total)
        if num_tokens:
            self._iteration.observe(num_tokens)

    def refused(self, protocol: str, error: ServiceError) -> None:
        """Counts a refused request."""
        self._count("peagle:requests", 1, protocol=protocol, code=error.code.name)
        self._rejected(error)

    def ended(self, stream: Stream) -> None:
        """Counts a stream that has ended."""
        self._count("peagle:requests", 1, protocol=stream.ask.protocol, code=stream.code.name)
        if stream.error is not None:
            self._rejected(stream.error)
        if stream.code is Code.RESOURCE_EXHAUSTED:  # the queue refused it
            return
        self._ends.append(stream.end)
        self._count("vllm:prompt_tokens", len(stream.ask.prompt))
        self._count("vllm:prompt_tokens_cached", stream.cached_tokens)
        for reason in stream.finish_reasons:
            self._count("vllm:request_success", 1, finished_reason=reason)
        if stream.first_token is None:
            return
        self._observe("time_to_first_token", stream.first_token - stream.arrival)
        self._observe("e2e_request_latency", stream.end - stream.arrival)
        for request in stream.requests:
            if request.first_token_time is None:
                continue
            self._observe("request_queue_time", request.start_time - stream.arrival)
            self._observe("request_prefill_time", request.first_token_time - request.start_time)
            decode = request.finish_time - request.first_token_time
            self._observe("request_decode_time", decode)
            self._observe("request_inference_time", request.finish_time - request.start_time)
            if request.num_tokens > 1:
                each = decode / (request.num_tokens - 1)
                self._observe("request_time_per_output_token", each)

    def seconds_per_request(self) -> float:
        """Estimate of the seconds until the queue has room, for RetryInfo: the mean time between
        recent ends.
        """
        if len(self._ends) < 2 or self._ends[-1] == self._ends[0]:
            return 1.0
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(30.0, max(0.1, pace))

    def _begin_counters(self) -> None:
        """Sets counters to 0: Prometheus sees no increase in a series that begins with another
        value.
        """
        self._count("vllm:prompt_tokens", 0)
        self._count("vllm:prompt_tokens_cached", 0)
        self._count("vllm:generation_tokens", 0)
        for reason in ("stop", "length", "abort", "error"):
            self._count("vllm:request_success", 0, finished_reason=reason)
        for code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
            self._count("vllm:admission_rejections", 0, reason=code.name.lower())
        for protocol in ("grpc", "http"):
            for code in Code:
                self._count("peagle:requests", 0, protocol=protocol, code=code.name)

    def _rejected(self, error: ServiceError) -> None:
        if error.retry_after is not None:
            self._count("vllm:admission_rejections", 1, reason=error.code.name.lower())

    def _count(self, name: str, amount: float, **labels: str) -> None:
        self._counters[name].labels(**self._labels, **labels).inc(amount)

    def _observe(self, name: str, seconds: float) -> None:
        self._latencies[name].observe(max(0.0, seconds))


class _EngineCollector(Collector):
    """Counters of the engine, read at each scrape."""

    def __init__(
        self,
        labels: dict[str, str],
        config: EngineConfig,
        load: Callable[[], Load],
        num_open: Callable[[], int],
        memory: Callable[[], Mapping[int, DeviceMemory]],
    ):
        self._config, self._load, self._num_open, self._memory = config, load, num_open, memory
        self._names, self._values = tuple(labels), tuple(labels.values())

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        counts = load.acceptance
        yield self._gauge("vllm:num_requests_running", "Requests on the device.", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", load.num_waiting)
        yield self._gauge("peagle:paused", "1: requests wait for an order.", load.is_paused)
        yield self._gauge("peagle:devices", "Devices of a round.", self._config.tensor_parallel)
        yield self._device_memory()
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue.",
            labels=[*self._names, "reason"],
        )
        waiting.add_metric([*self._values, "capacity"], load.num_waiting)
        yield waiting
        yield self._gauge("vllm:kv_cache_usage_perc", "KV pages in use, 0 to 1.", load.kv_usage)
        yield self._counter("vllm:num_preemptions", "Preemptions.", load.num_preemptions)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", load.prefix_queried),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", load.prefix_found),
            ("peagle:prefix_cache_restored_rings", "Windows found.", load.rings_restored),
        ):
            yield self._counter(name, text, value)
        yield self._gauge(
            "peagle:prefix_cache_idle_pages", "KV pages kept for later prompts.", load.pages_idle
        )
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds with drafts.", counts.rounds)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", counts.drafted)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that became output.", counts.accepted
        )
        yield from self._by_position(counts)
        yield self._counter(
            "peagle:spec_decode_num_emitted_tokens", "Tokens of rounds with drafts.", counts.emitted
        )
        yield self._gauge("peagle:acceptance_length", "AL since the start.", counts.length)
        yield self._counter(
            "peagle:requests_not_finite",
            "Sequences that failed because the model's logits were NaN or infinite.",
            load.num_not_finite,
        )
        drafts = GaugeMetricFamily(
            "peagle:num_speculative_tokens",
            "Drafts per round (K) by compiled batch size.",
            labels=[*self._names, "batch_size"],
        )
        for size, num_draft in load.num_draft.items():
            drafts.add_metric([*self._values, str(size)], num_draft)
        yield drafts
        yield self._counter(
            "peagle:num_speculative_tokens_changes",
            "Changes of a batch size's drafts per round at run time.",
            load.num_draft_changes,
        )
        yield self._gauge(
            "peagle:predicted_tokens_per_second",
            "Tokens per second that the last choice of drafts per round predicts.",
            load.predicted_rate,
        )
        yield self._gauge(OPEN_REQUESTS, "Requests not yet ended.", self._num_open())
        yield self._counter("peagle:rounds", "Rounds of the engine.", load.rounds)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Sizes of the KV cache.",
            labels=[*self._names, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*self._values, str(self._config.page_size), str(load.pages_total)], 1.0)
        yield info
        weights = GaugeMetricFamily(
            "peagle:weights_info", "Version of the weights.", labels=[*self._names, "version"]
        )
        weights.add_metric([*self._values, load.version], 1.0)
        yield weights

    def _device_memory(self) -> Metric:
        memory = GaugeMetricFamily(
            "peagle:device_memory_bytes",
            "Memory of each device of this process: used, the most since the start, and the limit.",
            labels=[*self._names, "device", "kind"],
        )
        for rank, one in self._memory().items():
            for kind, value in one._asdict().items():
                memory.add_metric([*self._values, str(rank), kind], value)
        return memory

    def _by_position(self, counts: Acceptance) -> Iterable[Metric]:
        """Drafts by position; those that the target verified are fewer where K was smaller."""
        for name, text, values in (
            (
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Drafts that became output, by position.",
                counts.per_position,
            ),
            (
                "peagle:spec_decode_num_draft_tokens_per_pos",
                "Drafts that the target verified, by position.",
                counts.drafted_per_position,
            ),
        ):
            positions = CounterMetricFamily(name, text, labels=[*self._names, "position"])
            for position, count in enumerate(values):
                positions.add_metric([*self._values, str(position)], count)
            yield positions

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family


class Histogram(Collector):
    """Counts values in one thread; a scrape reads it as prometheus_client's own histogram, which
    takes ten times as long for a value.

    Args:
      labels: of its only series.
      buckets: upper bounds, included, in ascending order; one without a bound is added.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]):
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = [*map(float, buckets), math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client's Collector."""
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        totals = itertools.accumulate(self._counts)
        buckets = [
            (floatToGoString(bound), total)
            for bound, total in zip(self._bounds, totals, strict=True)
        ]
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family
