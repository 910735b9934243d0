"""Log lines: how many of one kind are written."""

import io
import json
import logging
from types import SimpleNamespace

import pytest

from serving import logs
from serving.errors import Code, ServiceError


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
    finally:
        root.handlers[:], root.level = before, level
        for name, one in levels.items():
            logging.getLogger(name).setLevel(one)
    assert capsys.readouterr().err.count("Invalid HTTP request") == 20
