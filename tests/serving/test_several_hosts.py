"""One model on the devices of several processes: equal texts, and one end for all of them."""

import functools
import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from bench.served import Served
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.checkpoint import load_head, load_target, save_head, save_target
from peagle_jax.config import ConfigError
from peagle_jax.devices import Devices
from serving.protos import hosts_v1_pb2 as hosts
from serving.protos import hosts_v1_pb2_grpc, peagle_v1_pb2_grpc
from serving.protos import peagle_v1_pb2 as pb
from serving.settings import Settings
from tests import tiny
from tests.programs import one_bucket
from tests.serving.certificates import authority, signed
from tests.waiting import LIMIT, eventually

SIZES = dict(num_layers=1, num_heads=6, num_kv_heads=6)  # two and three hosts can share them
MAX_TOKENS = 20
LENGTHS = (3, 19, 30, 9, 25)
_LISTENS = re.compile(r"hosts connect to (\S+)")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with "target" and "head"."""
    folder = tmp_path_factory.mktemp("model")
    save_target(tiny.target(**SIZES), folder / "target", dtype="float32")
    head = tiny.head(**SIZES, num_taps=1, taps=(0,), trained_num_draft=3)
    save_head(head, folder / "head", max_position=512, dtype="float32")
    return folder


@pytest.fixture
def start(model, tmp_path):
    """Starts the processes of some hosts; all are killed at the end."""
    started: list[Served] = []

    def process(name: str, *options: str) -> Served:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PEAGLE_")}
        environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"
        started.append(Served(options, log=tmp_path / name, environment=environment))
        return started[-1]

    def hosts(count: int, *options: str, refused: Sequence[str] = ()) -> list[Served]:
        """Host 0 and its followers; `refused`: options of a follower that is refused before."""
        common = ["--model", str(model / "target"), "--tensor-parallel", str(count)]
        common += ["--num-hosts", str(count), "--adaptive", "off", "--no-cache", *options]
        common += ["--max-model-len", "64", "--prefill-chunk", "16"]
        leader = process("host-0", *common, "--coordinator", "127.0.0.1:0")
        eventually(lambda: listens_at(leader), "the leader listens")
        common += ["--coordinator", listens_at(leader)]
        if refused:
            stranger = process("refused", *common, "--host-index", "1", *refused)
            assert stranger.process.wait(LIMIT) == 2
            assert (
                "host 1 is refused: all hosts must be equal, and max_num_seqs is 2"
                in stranger.text()
            )
            assert "Traceback" not in stranger.text()
            assert leader.process.poll() is None
        numbers = range(1, count)
        return [leader, *(process(f"host-{i}", *common, "--host-index", str(i)) for i in numbers)]

    yield hosts
    for one in started:
        one.process.send_signal(signal.SIGCONT)
        one.__exit__()


def listens_at(leader: Served) -> str | None:
    leader.check(float("inf"), "listen for hosts")
    found = _LISTENS.search(leader.text())
    return found and found[1]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, tiny.TARGET.vocab_size, length).tolist() for length in LENGTHS]


@functools.cache
def of_one_process(model: Path, num_devices: int, **config) -> list[list[int]]:
    """Greedy texts of an engine over as many virtual devices."""
    devices = Devices(num_devices)
    target = load_target(model / "target", dtype="float32", devices=devices)
    head = None
    if config["num_draft"]:
        head = load_head(model / "head", target.config, dtype="float32", devices=devices)
    sizes = dict(max_model_len=64, prefill_chunk=16, tensor_parallel=num_devices)
    engine = one_bucket(Engine(target, head, EngineConfig(**sizes, **config)))
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [done.tokens for done in engine.generate(prompts(), params)]


def served(leader: Served) -> list[list[int]]:
    """The same texts from a server, requested at once."""
    stopping = pb.Stopping(max_tokens=MAX_TOKENS, ignore_eos=True)
    with grpc.insecure_channel(leader.wait(LIMIT)) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        calls = [
            stub.GenerateOnce.future(
                pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), stopping=stopping), timeout=LIMIT
            )
            for ids in prompts()
        ]
        return [list(call.result().sequences[0].token_ids) for call in calls]


class Load:
    """One stream after the other, until they fail; `status` is that of the last."""

    def __init__(self, leader: Served):
        self.num_tokens, self.status = 0, None
        address = leader.wait(LIMIT)
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()
        eventually(lambda: self.num_tokens > 50, "tokens flow")

    def _run(self, address: str) -> None:
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=[5, 6, 7]), stopping=pb.Stopping(max_tokens=50, ignore_eos=True)
        )
        with grpc.insecure_channel(address) as channel:
            stub = peagle_v1_pb2_grpc.GenerationStub(channel)
            try:
                while True:
                    for delta in stub.Generate(request, timeout=LIMIT):
                        self.num_tokens += len(delta.token_ids)
            except grpc.RpcError as error:
                self.status = error.code()

    def wait(self) -> grpc.StatusCode | None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self.status


def ends(host: Served) -> tuple[int, str]:
    """Exit code, and the log line that gives the reason."""
    code = host.process.wait(LIMIT)
    lines = [line for line in host.text().splitlines() if "ends with exit code" in line]
    assert len(lines) == 1, host.text()
    assert f"ends with exit code {code}: " in lines[0]
    assert "Traceback" not in host.text()
    return code, lines[0]


PLAIN = ("--method", "none", "--max-num-seqs", "1")


@pytest.mark.exhaustive
def test_two_hosts_write_the_text_of_one_process(start, model, tmp_path):
    """Their connection uses TLS, with certificates on both sides."""
    ca = authority(tmp_path, "ca")
    host = signed(tmp_path, "host", ca)
    files = {"cert": host.cert, "key": host.key, "ca": ca.cert}
    tls = [text for name, path in files.items() for text in (f"--hosts-tls-{name}", path)]
    leader, follower = start(2, *PLAIN, *tls)
    assert served(leader) == of_one_process(model, 2, num_draft=0, max_num_seqs=1)
    leader.process.terminate()
    assert [ends(host)[0] for host in (leader, follower)] == [0, 0]


@pytest.mark.slow
def test_drafts_and_preemption_change_nothing_and_a_killed_follower_ends_the_leader(start, model):
    """The five pages of 16 tokens hold one or two of the requests."""
    page = 2 * 2 * 4 * 16 * SIZES["num_heads"] // 2 * 8  # bytes of one device, target and head
    options = ["--drafter", str(model / "head"), "--num-speculative-tokens", "3"]
    options += ["--max-num-seqs", "4", "--kv-cache-memory", f"{6 * page}B"]
    leader, follower = start(2, *options)
    wanted = of_one_process(model, 2, num_draft=3, max_num_seqs=4)
    assert served(leader) == wanted
    assert wanted == of_one_process(model, 2, num_draft=0, max_num_seqs=1)
    with grpc.insecure_channel(leader.address) as channel:
        stats = peagle_v1_pb2_grpc.GenerationStub(channel).GetStats(pb.GetStatsRequest())
    assert stats.preemptions > 0
    load = Load(leader)
    follower.process.kill()
    code, line = ends(leader)
    assert code == 70
    assert "host 1 (" in line
    assert "its connection broke" in line
    assert load.wait() is not None


@pytest.mark.slow
def test_a_killed_leader_ends_its_follower(start):
    leader, follower = start(2, *PLAIN)
    load = Load(leader)
    with grpc.insecure_channel(listens_at(leader)) as channel:  # a process of another user
        stub = hosts_v1_pb2_grpc.HostsStub(channel)
        with pytest.raises(grpc.RpcError, match="token is not known") as caught:
            next(stub.Follow(iter([hosts.Report(hello=hosts.Hello(host=1))])))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    leader.process.kill()
    code, line = ends(follower)
    assert code == 70
    assert "host 0" in line
    assert load.wait() is not None


@pytest.mark.slow
def test_a_process_that_hangs_ends_all(start):
    # On a busy machine the first rounds take seconds.
    leader, follower = start(2, *PLAIN, "--hosts-seconds", "10")
    load = Load(leader)
    follower.process.send_signal(signal.SIGSTOP)
    code, line = ends(leader)
    assert code == 71
    assert "host 1 has been silent for 10 s" in line or "no result within 10 s" in line
    assert load.wait() is not None
    follower.process.send_signal(signal.SIGCONT)
    assert ends(follower)[0] in (70, 71)


@pytest.mark.exhaustive
def test_three_hosts_stop_when_one_gets_sigterm(start, model):
    leader, *followers = start(3, *PLAIN, refused=["--max-num-seqs", "2"])
    assert served(leader) == of_one_process(model, 3, num_draft=0, max_num_seqs=1)
    followers[0].process.terminate()
    assert [ends(host)[0] for host in (leader, *followers)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(coordinator="10.0.0.1:7000"), "needs hosts_token_file"),
        (dict(coordinator="10.0.0.1"), "write HOST:PORT"),
        (dict(coordinator=None), "needs coordinator"),
        (dict(host_index=2), "must be 0 to 1"),
        (dict(tensor_parallel=3), "num_hosts=2 must divide tensor_parallel=3"),
        (dict(num_hosts=1), "need num_hosts, 2 or more"),
        (dict(num_hosts=1, coordinator=None, hosts_tls_ca="a"), "need num_hosts, 2 or more"),
        (dict(hosts_tls_cert="a"), "belong together"),
        (dict(host_index=1, hosts_tls_key="a"), "belong together"),
        (dict(hosts_tls_ca="a"), "give hosts_tls_cert and hosts_tls_key too"),
        (dict(host_index=1, hosts_tls_cert="a", hosts_tls_key="a"), "needs hosts_tls_ca"),
        (
            dict(coordinator="10.0.0.1:7000", hosts_tls_cert="a", hosts_tls_key="a"),
            "hosts_token_file",
        ),
        (dict(coordinator="10.0.0.1:7000", host_index=1, hosts_tls_ca="a"), "hosts_token_file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_no_host_can_have_are_refused(changes, reason):
    right = dict(num_hosts=2, tensor_parallel=2, coordinator="127.0.0.1:7000")
    assert Settings(**right).devices_per_host == 1
    with pytest.raises(ConfigError, match=reason):
        Settings(**(right | changes))


def test_certificates_of_the_hosts_replace_the_token_and_its_warning():
    right = dict(num_hosts=2, tensor_parallel=2, coordinator="10.0.0.1:7000")
    files = dict(hosts_tls_cert="a", hosts_tls_key="b", hosts_tls_ca="c")
    for index in (0, 1):
        assert Settings(**right, **files, host_index=index).warnings == []
        (warning,) = Settings(**right, hosts_token_file="d", host_index=index).warnings
        assert "pass between hosts unencrypted" in warning
    assert Settings(**right, hosts_token_file="d", hosts_tls_ca="c", host_index=1).warnings == []
