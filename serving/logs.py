"""Log lines as JSON on stderr: one per request, and one with the engine's figures every few
seconds.

Lines that any client can cause (refusals, warnings, errors) are limited per kind, and the lines
left out are counted: otherwise a client without a token could fill the disk.
"""

import asyncio
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from peagle_jax.engine.host.stats import Acceptance
from serving.background_stream import BackgroundStream
from serving.errors import Code, ServiceError, shortened

if TYPE_CHECKING:  # the process of the engine writes a log too, and needs neither
    from serving.frontend import Frontend
    from serving.stream import Stream

_log = logging.getLogger("serving")


class _Lines(logging.Formatter):
    """Formats a record as one JSON object; `extra={"fields": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_LONGEST_TRACE:]
        line = {name: _cut(value) for name, value in line.items()}
        return json.dumps(line, ensure_ascii=False)


def _cut(value: object) -> object:
    return shortened(value, _LONGEST_TRACE) if isinstance(value, str) else value


_LONGEST, _LONGEST_TRACE = 256, 16 << 10
"""Characters of what a client sends, and of an exception or any other text."""
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]{0,63}", re.ASCII)
_QUOTE_CLIENTS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.PERMISSION_DENIED)
"""Errors whose messages quote the request: keys, words, patterns."""
_BURST = 20  # lines of one kind
_WINDOW = 10.0  # seconds


class LimitedHandler(logging.StreamHandler):
    """Writes at most `_BURST` lines of one kind in `_WINDOW` seconds, and then the number of lines
    left out.

    Two lines are of one kind if they have the same logger, level and unformatted message, or the
    same attribute `kind`, which `extra` sets. Lines whose `kind` is None are never limited.

    Args:
      stream: where lines are written.
      clock: a clock that never goes back, in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[object, _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._close_windows(now)
        key = getattr(record, "kind", (record.name, record.levelno, record.msg))
        if key is not None:
            kind = self._kinds.setdefault(key, _Kind(record, until=now + _WINDOW))
            kind.count += 1
            if kind.count > _BURST:
                return
        self._write(record)

    def close(self) -> None:
        """Writes the counts of lines left out, and closes."""
        self._close_windows(math.inf)
        self.flush()
        super().close()

    def _close_windows(self, now: float) -> None:
        # The first kind has the oldest window, because all windows have the same length.
        while self._kinds:
            key, kind = next(iter(self._kinds.items()))
            if kind.until > now:
                break
            del self._kinds[key]
            if kind.count > _BURST:
                self._write(kind.summary())

    def _write(self, record: logging.LogRecord) -> None:
        """Writes a line without a flush, which would wait for the line to be read."""
        try:
            self.stream.write(f"{self.format(record)}\n")
        except Exception:  # of the arguments of a line
            self.handleError(record)


@dataclass
class _Kind:
    """Lines of one kind in one window; the summary quotes `first`."""

    first: logging.LogRecord
    until: float
    count: int = 0

    def summary(self) -> logging.LogRecord:
        first = self.first
        return logging.makeLogRecord(
            dict(
                name=first.name,
                levelno=first.levelno,
                levelname=first.levelname,
                msg=f"left out {self.count - _BURST} lines like: {first.getMessage()}",
                fields=getattr(first, "fields", {}),
            )
        )


def configure(level: str) -> None:
    """Sends all log lines to stderr as JSON."""
    lines = _Lines()
    handler = LimitedHandler(
        BackgroundStream(sys.stderr, dropped=lambda count: _dropped(lines, count))
    )
    handler.setFormatter(lines)
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)
    for name in ("serving", "peagle_jax", "pallas_kernels"):
        logging.getLogger(name).setLevel(level.upper())


def _dropped(lines: _Lines, count: int) -> str:
    message = f"dropped {count} lines, which nobody read in time"
    record = dict(name=_log.name, levelno=logging.WARNING, levelname="WARNING", msg=message)
    return lines.format(logging.makeLogRecord(record)) + "\n"


def _error_fields(error: ServiceError) -> dict[str, str]:
    """What the log may say about an error: nothing that quotes the client, but the name
    of a field.
    """
    if error.code not in _QUOTE_CLIENTS:
        return {"error": error.message}
    return {"field": error.field} if error.field and _FIELD.fullmatch(error.field) else {}


def log_request(stream: "Stream") -> None:
    """Logs a stream that has ended."""
    ask, usage = stream.ask, stream.usage()
    fields = dict(
        request_id=ask.request_id,
        protocol=ask.protocol,
        method=ask.method,
        status=stream.code.name,
        finish_reasons=stream.finish_reasons,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        n=ask.n,
        time_to_first_token=round(usage.time_to_first_token, 6),
        duration=round(usage.duration, 6),
        acceptance_length=round(usage.acceptance.length, 3),
    )
    if "traceparent" in ask.trace:
        fields["traceparent"] = ask.trace["traceparent"]
    if stream.error is not None:
        fields |= _error_fields(stream.error)
    # Never limited (kind None): the log has a line for every accepted request.
    _log.info("request", extra={"fields": fields, "kind": None})


def log_refusal(protocol: str, method: str, error: ServiceError) -> None:
    """Logs a refused request."""
    fields = dict(protocol=protocol, method=shortened(method, _LONGEST), status=error.code.name)
    fields |= _error_fields(error)
    _log.info("request", extra={"fields": fields, "kind": ("refusal", protocol, error.code)})


async def log_figures(frontend: "Frontend", seconds: float) -> None:
    """Logs load, speed and acceptance every `seconds` while there is work."""
    before, then = Acceptance(), time.monotonic()
    tokens_before = frontend.load.num_tokens
    while True:
        await asyncio.sleep(seconds)
        load, now = frontend.load, time.monotonic()
        tokens, counts = load.num_tokens, load.acceptance
        if tokens == tokens_before and not (load.num_running or load.num_waiting):
            then = now
            continue
        fresh = counts - before
        fields = dict(
            running=load.num_running,
            waiting=load.num_waiting,
            kv_usage=round(load.kv_usage, 4),
            tokens_per_second=round((tokens - tokens_before) / (now - then), 1),
            drafted_per_second=round(fresh.drafted / (now - then), 1),
            accepted_per_second=round(fresh.accepted / (now - then), 1),
            acceptance_length=round(fresh.length, 3),
            acceptance_per_position=[round(rate, 3) for rate in fresh.rates],
            preemptions=load.num_preemptions,
        )
        _log.info("figures", extra={"fields": fields})
        before, then, tokens_before = counts, now, tokens
