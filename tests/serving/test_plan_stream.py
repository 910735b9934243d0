"""The stream between hosts: who may join, and that calls arrive as they were sent."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.engine.calls import RoundShape
from peagle_jax.engine.device_calls import (
    PREFILL,
    Compile,
    CopyRings,
    GreedyRound,
    Run,
    WriteControls,
)
from serving.hosts import Fate, identity
from serving.rpc.device_calls import from_message, to_message
from serving.rpc.follower import LeaderStream
from serving.rpc.leader import Leader
from serving.settings import Settings
from tests.waiting import LIMIT

SHAPE = RoundShape(4, 3, 8)
ARRAY = np.array([0, -1, 2**31 - 1], np.int32)
CALLS = [
    Compile((PREFILL, SHAPE, GreedyRound(SHAPE))),
    Run(PREFILL, ARRAY, ARRAY[:1]),
    Run(GreedyRound(SHAPE), ARRAY, None),
    Run(SHAPE, None, None),
    WriteControls(ARRAY),
    CopyRings(2, 5),
]
MINE = {"version": "1", "num_draft": "7"}


def as_lists(call) -> list:
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in (type(call), *call)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_survives_its_message(call):
    message = to_message(call, 9)
    found = from_message(type(message).FromString(message.SerializeToString()))
    assert message.number == 9
    assert as_lists(found) == as_lists(call)


class Process:
    """Stands for a process that ends: the thread that ends it stops for good."""

    def __init__(self):
        self.codes: queue.Queue[int] = queue.Queue()

    def leave(self, code: int) -> None:
        self.codes.put(code)
        threading.Event().wait()


@pytest.fixture
def leader():
    """A leader of two hosts with a token, and where it listens."""
    process = Process()
    one = Leader(2, MINE, tokens=[b"secret"], seconds=60.0, fate=Fate(0, process.leave))
    port = one.start("127.0.0.1", 0)
    yield SimpleNamespace(leader=one, address=f"127.0.0.1:{port}", process=process)
    one.close()


def join(leader, host=1, token=b"secret", identity=MINE) -> tuple[LeaderStream, Process]:
    process = Process()
    rules = dict(token=token, seconds=60.0, fate=Fate(host, process.leave))
    return LeaderStream(host, leader.address, identity, **rules), process


def test_who_does_not_fit_is_refused_and_the_rest_join(leader):
    for changes, reason in [
        (dict(token=None), "token is not known"),
        (dict(token=b"other"), "token is not known"),
        (dict(host=2), "host-index must be between 1 and 1"),
        (dict(identity=MINE | {"num_draft": "3"}), "num_draft is 3 there and 7 here"),
        (dict(identity={"version": "1"}), "num_draft is None there and 7 here"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            join(leader, **changes)[0].join(LIMIT)
    with pytest.raises(ConfigError, match="host 1 has not connected within 0 s"):
        leader.leader.wait_for_hosts(0)
    stream, process = join(leader)
    joined = queue.Queue()
    threading.Thread(target=lambda: joined.put(stream.join(LIMIT)), daemon=True).start()
    leader.leader.wait_for_hosts(LIMIT)
    with pytest.raises(ConfigError, match="another process is host 1 already"):
        join(leader)[0].join(LIMIT)
    leader.leader.welcome("there:1")
    assert joined.get(timeout=LIMIT) == "there:1"
    performed = queue.Queue()
    follower = SimpleNamespace(perform=performed.put)
    threading.Thread(target=stream.perform, args=(follower,), daemon=True).start()
    for call in CALLS:
        leader.leader.send(call)
    found = [as_lists(performed.get(timeout=LIMIT)) for _ in CALLS]
    assert found == [as_lists(call) for call in CALLS]
    ending = (3, "a test")
    threading.Thread(target=leader.leader.end, args=ending, daemon=True).start()
    assert process.codes.get(timeout=LIMIT) == 70


def test_a_call_that_is_missing_ends_the_follower(leader):
    stream, process = join(leader)
    stream._calls.put(to_message(CALLS[0], 2))
    stream._fate.is_sealed.wait = lambda seconds: None  # no other host is to blame
    stream._is_closed.set()
    threading.Thread(target=stream.perform, args=(None,), daemon=True).start()
    assert process.codes.get(timeout=LIMIT) == 1


def test_what_must_be_equal_changes_with_sizes_and_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5 << 20))
    given = dict(model=str(tmp_path), drafter=str(tmp_path))
    before = identity(Settings(**given))
    assert identity(Settings(**given)) == before
    assert identity(Settings(**given, max_num_seqs=5)) != before
    assert identity(Settings(**given, port=5, log_level="debug")) == before
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    changed = identity(Settings(**given))
    differing = {name for name in before if before[name] != changed[name]}
    assert differing == {"files of the target", "files of the drafter"}
