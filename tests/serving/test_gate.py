"""Which connection is closed when a limit is reached: young ones of other addresses last."""

import contextlib
import socket
import threading

import pytest

from serving.http.gate import Gate
from tests.serving.test_http_connections import GET, connect, read_all
from tests.waiting import LIMIT


class Hall:
    """A gate with a clock of its own; connections are named "address/number"."""

    def __init__(self, **limits: int):
        self.now = 0.0
        self.gate = Gate(**limits, grace_seconds=1.0, clock=lambda: self.now)
        self.closed: list[str] = []
        self.slots: dict[str, object] = {}

    def enter(self, *names: str) -> None:
        for name in names:
            close = lambda name=name: self.closed.append(name)
            self.slots[name] = self.gate.enter(name.partition("/")[0], close)

    def serve(self, name: str) -> None:
        """A request and its answer."""
        self.gate.set_idle(self.slots[name], False)
        self.gate.set_idle(self.slots[name], True)


def test_a_burst_replaces_its_own_young_connections():
    hall = Hall(most=3, most_per_address=3)
    hall.enter("probe/1", "burst/1", "burst/2", "burst/3", "burst/4")
    assert hall.closed == ["burst/1", "burst/2"]


def test_a_burst_does_not_replace_a_young_connection_in_a_reserved_place():
    hall = Hall(most=1, most_per_address=1, reserve=2)
    hall.enter("busy/1")
    hall.gate.set_idle(hall.slots["busy/1"], False)
    hall.enter("probe/1", "burst/1", "burst/2", "burst/3")
    assert hall.closed == ["burst/1", "burst/2"]
    assert hall.slots["probe/1"].is_reserved


def test_an_older_connection_is_replaced_before_a_young_one():
    hall = Hall(most=3, most_per_address=3)
    hall.enter("silent/1")
    hall.now = 0.5
    hall.enter("kept/1")
    hall.serve("kept/1")
    hall.now = 1.6
    hall.enter("burst/1", "burst/2", "burst/3", "burst/4")
    assert hall.closed == ["silent/1", "kept/1", "burst/1"]


def test_an_answered_connection_is_replaced_before_a_young_one_of_another_address():
    hall = Hall(most=2, most_per_address=2)
    hall.enter("probe/1")
    hall.now = 0.1
    hall.enter("kept/1")
    hall.serve("kept/1")
    hall.enter("new/1")
    assert hall.closed == ["kept/1"]


def test_silent_connections_are_spared_for_the_grace_only():
    hall = Hall(most=2, most_per_address=2)
    hall.enter("first/1")
    hall.now = 0.5
    hall.enter("second/1")
    hall.now = 1.2
    hall.enter("second/2")
    assert hall.closed == ["first/1"]


def test_young_connections_do_not_exceed_the_limit_of_their_address():
    hall = Hall(most=9, most_per_address=2)
    hall.enter("other/1", "burst/1", "burst/2", "burst/3", "burst/4")
    assert hall.closed == ["burst/1", "burst/2"]
    assert hall.gate.num_open == 3


@pytest.mark.parametrize("most_per_address", [4, 2])
def test_a_probe_is_answered_in_a_burst_of_connections(server, most_per_address):
    """All wait in the listening socket's queue, so that one turn of the event loop accepts them."""
    gate = Gate(most=4, most_per_address=most_per_address, reserve=1, grace_seconds=LIMIT)
    is_held, released = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert released.wait(LIMIT)

    with server.another_http(gate=gate) as address, contextlib.ExitStack() as stack:
        holding = threading.Thread(target=server.call, args=(hold,))
        holding.start()
        try:
            assert is_held.wait(LIMIT)
            probe = stack.enter_context(connect(address, "127.0.0.2"))
            burst = [stack.enter_context(connect(address, "127.0.0.3")) for _ in range(30)]
        finally:
            released.set()
            holding.join(LIMIT)
        for one in burst[:20]:
            assert read_all(one) == b""  # closed, so all of them were accepted
        probe.sendall(GET + b"\r\n")
        assert probe.recv(15, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"
