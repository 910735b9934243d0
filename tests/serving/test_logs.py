"""Log lines: how many of one kind are written."""

import io
import json
import logging
import os
from types import SimpleNamespace

import pytest

from serving import logs
from serving.background_stream import BackgroundStream
from serving.errors import Code, ServiceError
from serving.request_ids import trace_headers


@pytest.fixture
def written():
    """A logger with the server's handler; `lines()` has what was written, `now` is the time."""
    stream, time = io.StringIO(), SimpleNamespace(now=0.0)
    handler = logs.LimitedHandler(stream, clock=lambda: time.now)
    handler.setFormatter(logs._Lines())
    logger = logging.getLogger("serving")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    time.log, time.handler = logger, handler
    time.lines = lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    yield time
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_lines_of_one_kind_are_limited_and_those_left_out_are_counted(written):
    for number in range(5000):
        written.log.warning("refused connection %d", number)
    written.log.warning("something else")
    assert len(written.lines()) == 21
    written.now = 10.0
    written.log.warning("something else")
    last = written.lines()[-2]
    assert last["message"] == "left out 4980 lines like: refused connection 0"
    assert last["level"] == "warning"
    written.log.warning("refused connection %d", 5000)
    assert written.lines()[-1]["message"] == "refused connection 5000"


def test_lines_left_out_last_are_counted_at_the_end(written):
    for _ in range(25):
        written.log.warning("again")
    written.handler.close()
    assert written.lines()[-1]["message"] == "left out 5 lines like: again"


def test_refusals_are_limited_whatever_their_text_and_requests_never(written):
    for number in range(300):
        error = ServiceError(Code.UNAUTHENTICATED, f"told otherwise {number}")
        logs.log_refusal("http", f"/path/{number}", error)
        written.log.info("request", extra={"fields": {"request_id": number}, "kind": None})
    found = [line.get("status") for line in written.lines()]
    assert found.count("UNAUTHENTICATED") == 20
    assert found.count(None) == 300
    logs.log_refusal("http", "/", ServiceError(Code.NOT_FOUND, "another status"))
    assert written.lines()[-1]["status"] == "NOT_FOUND"


def test_the_server_logs_through_that_handler(capsys):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    levels = {
        name: logging.getLogger(name).level for name in ("serving", "peagle_jax", "pallas_kernels")
    }
    try:
        logs.configure("info")
        for _ in range(100):
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        root.handlers[0].stream.flush()
    finally:
        root.handlers[:], root.level = before, level
        for name, one in levels.items():
            logging.getLogger(name).setLevel(one)
    assert capsys.readouterr().err.count("Invalid HTTP request") == 20


def test_a_reader_that_stops_delays_nobody_and_lines_that_it_missed_are_counted():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        output = BackgroundStream(
            stream, dropped=lambda count: f"dropped {count}\n", most_chars=10_000
        )
        for number in range(3000):  # the pipe has room for 64 KiB
            output.write(f"{number:>99}\n")
        read = bytearray()
        while b"dropped" not in read or not read.endswith(b"again\n"):
            read += os.read(reader, 1 << 16)
            output.write("again\n")
        lines = [line for line in read.decode().splitlines() if line != "again"]
        dropped = [int(line.split()[1]) for line in lines if line.startswith("dropped")]
        written = [int(line) for line in lines if not line.startswith("dropped")]
        assert written == sorted(set(written))
        assert sum(dropped) >= 3000 - len(written) > 0
        os.close(reader)
        for _ in range(3):  # nobody can read any more
            output.write("to nobody\n")
        output.flush()


REFUSED = [
    (Code.INVALID_ARGUMENT, "bad_words[0]", {"field": "bad_words[0]"}),
    (Code.INVALID_ARGUMENT, "my secret key", {}),
    (Code.NOT_FOUND, None, {}),
]


@pytest.mark.parametrize(("code", "field", "expected"), REFUSED)
def test_a_refusal_is_cut_and_quotes_nothing(written, code, field, expected):
    error = ServiceError(code, "the word 'secret' is refused", field=field)
    logs.log_refusal("http", "/" + "a" * 60_000, error)
    (line,) = written.lines()
    assert "secret" not in json.dumps(line | {"field": ""})
    assert len(line["method"]) == 256
    assert {name: line[name] for name in ("field",) if name in line} == expected


def test_a_trace_of_another_form_is_not_taken():
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert trace_headers([("traceparent", good), ("tracestate", "vendor=1")]).keys() == {
        "traceparent",
        "tracestate",
    }
    assert trace_headers([("traceparent", good * 1000), ("tracestate", "a" * 60_000)]) == {}
