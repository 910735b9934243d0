"""OpenTelemetry spans: one a request, child of the client's span, written when the request has
ended.

Needs the extra `tracing`, which is imported only if spans are wanted.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from peagle_jax.config import ConfigError
from peagle_jax.extras import check_installed
from serving.errors import Code
from serving.stream import Stream
from serving.version import NAME, VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_CLOSE_SECONDS = 3.0


class Tracer:
    """Writes spans.

    Args:
      provider: OpenTelemetry's provider; the tracer owns it.
      model: what clients call the model.
    """

    def __init__(self, provider: "TracerProvider", model: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer(NAME)
        self._parent_of: Callable = TraceContextTextMapPropagator().extract

    @classmethod
    def to(cls, endpoint: str, model: str) -> Self:
        """A tracer that sends spans by OTLP over gRPC, in batches and from a thread of its own.

        Args:
          endpoint: for example "http://collector:4317"; https:// for TLS.

        Raises:
          ConfigError: OpenTelemetry is not installed, or the endpoint is not a URL.
        """
        check_installed("tracing", f"otlp_endpoint={endpoint!r}")
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint={endpoint!r} must begin with http:// or https://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        provider = TracerProvider(
            resource=Resource.create({"service.name": NAME, "service.version": VERSION}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, model)

    def report(self, stream: Stream) -> None:
        """Writes the span of a stream that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ask = stream.ask
        # Spans have wall-clock time; streams measure with a monotonic clock.
        offset = time.time_ns() - time.monotonic_ns()
        at = lambda seconds: offset + int(seconds * 1e9)
        operation = "chat" if ask.is_chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parent_of(ask.trace),
            kind=SpanKind.SERVER,
            start_time=at(stream.arrival),
            attributes=self._attributes(stream) | {"gen_ai.operation.name": operation},
        )
        if stream.first_token is not None:
            span.add_event("first token", timestamp=at(stream.first_token))
        if stream.error is not None:
            span.set_attribute("error.type", stream.code.name)
            span.set_status(Status(StatusCode.ERROR, stream.error.message))
        elif stream.code is Code.OK:
            span.set_status(Status(StatusCode.OK))
        span.end(end_time=at(stream.end))

    def close(self) -> None:
        """Sends the remaining spans, for at most `_CLOSE_SECONDS`: the collector may be down."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    def _attributes(self, stream: Stream) -> dict:
        """Attributes with vLLM's names, and with our own where vLLM has none."""
        ask, usage = stream.ask, stream.usage()
        attributes = {
            "gen_ai.request.id": ask.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": ask.params.max_tokens,
            "gen_ai.request.temperature": ask.params.temperature,
            "gen_ai.request.top_p": ask.params.top_p,
            "gen_ai.request.n": ask.n,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.latency.e2e": stream.end - stream.arrival,
            "peagle.protocol": ask.protocol,
            "peagle.method": ask.method,
            "peagle.status": stream.code.name,
            "peagle.drafted_tokens": usage.acceptance.drafted,
            "peagle.accepted_tokens": usage.acceptance.accepted,
            "peagle.acceptance_length": usage.acceptance.length,
        }
        if reasons := stream.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = reasons
        return attributes | _latencies(stream)


def _latencies(stream: Stream) -> dict[str, float]:
    """Latencies of a request: from its first sequence that began to its last that ended."""
    latencies = {}
    if stream.first_token is not None:
        latencies["time_to_first_token"] = stream.first_token - stream.arrival
    ended = [one for one in stream.requests if one.first_token_time is not None]
    if ended:
        start = min(one.start_time for one in ended)
        first = min(one.first_token_time for one in ended)
        end = max(one.finish_time for one in ended)
        latencies |= {
            "time_in_queue": max(0.0, start - stream.arrival),
            "time_in_model_prefill": first - start,
            "time_in_model_decode": end - first,
            "time_in_model_inference": end - start,
        }
    return {f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()}
