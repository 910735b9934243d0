"""The socket between a server's processes: a reader that stalls never holds the engine."""

import itertools
import random
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from serving import hub
from serving.frames import Channel, Inbox, encode
from serving.hub import Hub
from serving.messages import Job, Load, Tokens
from serving.worker import RunClock
from tests.waiting import LIMIT, eventually


class Worker:
    """What the hub uses of a worker; it runs nothing."""

    def __init__(self):
        parts = dict(config=None, target_config=None, drafter_config=None, tokenizer=None)
        self.description, self.load = SimpleNamespace(**parts), Load()
        self.batch_sizes_pending, self.busy_seconds, self.device_memory = 0, 0.0, {}
        self.submitted, self.aborted = [], []

    def start(self, listener, call) -> None:
        self.listener = listener

    def submit(self, jobs) -> None:
        self.submitted += jobs

    def abort(self, key) -> None:
        self.aborted.append(key)


@pytest.fixture
def connected():
    """A hub with its worker, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    made, lost = Worker(), threading.Event()
    connection = Hub(theirs, on_lost=lost.set)
    connection.describe(made)
    end = Channel(ours)
    ours.settimeout(LIMIT)
    assert end.receive()[0] == "described"
    yield SimpleNamespace(worker=made, end=end, lost=lost, hub=connection)
    ours.close()
    assert lost.wait(LIMIT)
    theirs.close()
    connection._awake.close()
    connection._waker.close()


def test_messages_are_whole_however_their_bytes_arrive():
    rng, messages = random.Random(1), [("a", i, "x" * i) for i in range(200)]
    data = b"".join(map(encode, messages))
    inbox, found, start = Inbox(), [], 0
    while start < len(data):
        size = rng.choice([1, 3, 50, 4000])
        found += inbox.feed(data[start : start + size])
        start += size
    assert found == messages


def job(number: int) -> Job:
    return Job((number, 0), [1], None)


def test_a_process_that_does_not_read_counts_as_gone(connected, monkeypatch):
    monkeypatch.setattr(hub, "_MOST_UNREAD", 1 << 20)
    worker = connected.worker
    connected.end.send(("submit", [job(3)]))
    eventually(lambda: [one.key for one in worker.submitted] == [(3, 0)])
    rounds = 0
    while not connected.lost.is_set():
        worker.listener.deliver([Tokens((3, 0), [7] * 5000)], 5000)
        rounds += 1
        assert rounds < 10_000
    assert connected.end.receive()[1] == [((3, 0), [7] * 5000, None, None, None, 0, None)]


def test_a_job_takes_its_matcher_and_one_that_is_forgotten_is_gone(connected):
    worker, end = connected.worker, connected.end
    made = [object(), object()]
    worker.matchers = lambda definition, number: made
    end.send(("compile", 9, "definition", 2))
    assert end.receive() == ("answer", 9, None)
    end.send(("submit", [Job((2, 0), [1], None, matcher=(9, 0))]))
    end.send(("forget", (9, 1)))
    end.send(("abort", (2, 0)))
    eventually(lambda: worker.aborted == [(2, 0)])
    assert [one.matcher for one in worker.submitted] == made[:1]
    assert connected.hub._matchers == {}


def test_time_in_which_a_process_does_not_run_does_not_count():
    times = iter([0.0, 1.0, 2.0, 3602.0, 3603.0])
    clock = RunClock(lambda: next(times))
    assert [clock.now() for _ in range(4)] == [1.0, 2.0, 3.5, 4.5]


def test_a_round_that_takes_long_is_told_again_and_again(connected):
    first = connected.end
    connected.worker.busy_seconds = 7.0
    messages = iter(first.receive, None)
    assert ("busy", 7.0) in itertools.islice(messages, 3)
    connected.worker.busy_seconds = 8.0
    assert ("busy", 8.0) in itertools.islice(messages, 3)


def test_a_hub_that_fails_ends_its_process_with_a_line_and_code_1():
    """Nobody would read submits and aborts any more, and clients would wait for ever."""
    code = (
        "import socket, threading; from serving.hub import Hub; from serving.logs import configure;"
        "configure('info'); ours, theirs = socket.socketpair(); hub = Hub(ours, on_lost=print);"
        "hub._handle = None; theirs.send(bytes(8) + b'no frame'); threading.Event().wait()"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert made.returncode == 1
    assert "the engine's process cannot go on" in made.stderr
