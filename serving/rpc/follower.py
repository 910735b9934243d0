"""A host beside host 0: it repeats the leader's device calls, and ends when the leader does."""

import queue
import signal
import threading
from collections.abc import Mapping
from types import FrameType

import grpc

from peagle_jax.config import ConfigError
from peagle_jax.engine.device.follower import Follower
from serving.hosts import BEATS, FAILED, HUNG, LOST, Fate, Heartbeats
from serving.protos import hosts_v1_pb2 as pb
from serving.protos import hosts_v1_pb2_grpc
from serving.rpc.device_calls import from_message
from serving.signals import exit_at_once

_LEADER = 0
_LAST_SECONDS = 5.0
"""For the last message to the leader, which then closes the stream."""
_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class LeaderStream:
    """The stream to the leader.

    Args:
      host: number of this host.
      address: "host:port" where the leader listens.
      identity: see `hosts.identity`.
      token: bearer token; None sends none.
      seconds: see `Heartbeats`.
      fate: of this process.
      credentials: of TLS; None connects without.
    """

    def __init__(
        self,
        host: int,
        address: str,
        identity: Mapping[str, str],
        *,
        token: bytes | None,
        seconds: float,
        fate: Fate,
        credentials: grpc.ChannelCredentials | None = None,
    ):
        self._host, self._address, self._fate = host, address, fate
        self._heartbeats = Heartbeats(seconds)
        self._reports: queue.SimpleQueue[pb.Report | None] = queue.SimpleQueue()
        self._reports.put(pb.Report(hello=pb.Hello(host=host, identity=identity)))
        self._calls: queue.SimpleQueue[pb.Call] = queue.SimpleQueue()
        self._num_calls = 0
        self._has_started, self._is_closed = threading.Event(), threading.Event()
        if credentials is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, credentials)
        stub = hosts_v1_pb2_grpc.HostsStub(self._channel)
        metadata = [] if token is None else [("authorization", b"Bearer " + token)]
        metadata = [(name, value.decode()) for name, value in metadata]
        reports = iter(self._reports.get, None)
        self._orders = stub.Follow(reports, metadata=metadata, wait_for_ready=True)

    def join(self, seconds: float) -> str:
        """Waits until the leader has all hosts, and returns the address of jax's coordination service.

        Raises:
          ConfigError: the leader refuses this host, or has not answered after `seconds`.
        """
        threading.Thread(target=self._beat, name="hosts", daemon=True).start()
        limit = threading.Timer(seconds, self._orders.cancel)
        limit.daemon = True
        limit.start()
        try:
            for order in self._orders:
                self._heartbeats.record(_LEADER)
                if order.WhichOneof("kind") == "welcome":
                    threading.Thread(target=self._read, name="leader", daemon=True).start()
                    return order.welcome.jax_address
                if order.WhichOneof("kind") == "end":
                    self._fate.end(order.end.exit_code, order.end.reason)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                raise ConfigError(error.details()) from error
            if error.code() is grpc.StatusCode.CANCELLED:
                text = f"host 0 at {self._address} has not answered within {seconds:g} s"
                raise ConfigError(f"{text}, or has not found all hosts") from error
            self._lose(_text(error))
        finally:
            limit.cancel()
        self._lose("it closed the stream")

    def report_devices(self, kind: str, count: int) -> None:
        """Reports the devices of this host, and waits until the leader has those of all."""
        self._reports.put(pb.Report(devices=pb.Devices(kind=kind, count=count)))
        self._has_started.wait()

    def follow(self, follower: Follower) -> None:
        """Performs the leader's calls until the process ends; it does not return.

        The main thread must call it: SIGTERM and SIGINT ask the leader to stop.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward_stop)
        threading.Thread(target=self.perform, args=(follower,), name="engine", daemon=True).start()
        threading.Event().wait()

    def _forward_stop(self, number: int, _: FrameType | None) -> None:
        self._reports.put(pb.Report(stop=pb.Stop()))
        signal.signal(number, exit_at_once)

    def perform(self, follower: Follower) -> None:
        """Performs the leader's calls in the thread that calls it; it does not return."""
        try:
            while True:
                message = self._calls.get()
                if message.number != self._num_calls + 1:
                    text = f"call {message.number} follows call {self._num_calls}"
                    raise RuntimeError(f"the leader's calls are out of order: {text}")
                follower.perform(from_message(message))
                self._num_calls = message.number
        except BaseException as error:
            self.wait_for_blame()
            self.end(FAILED, f"the engine failed: {' '.join(str(error).split())}")

    def end(self, code: int, reason: str) -> None:
        """Ends this process and with it all others; it does not return."""
        self._fate.end(code, reason, self._notify)

    def wait_for_blame(self) -> None:
        """See `Fate.wait_for_blame`."""
        self._fate.wait_for_blame()

    def _notify(self, code: int, reason: str) -> None:
        self._reports.put(pb.Report(end=pb.End(exit_code=code, reason=reason)))
        self._reports.put(None)
        self._is_closed.wait(_LAST_SECONDS)

    def _beat(self) -> None:
        while not self._fate.is_sealed.wait(min(1.0, self._heartbeats.seconds / BEATS)):
            self._reports.put(pb.Report(alive=pb.Alive(num_calls=self._num_calls)))
            if self._heartbeats.silent() is not None:
                text = (
                    f"host 0 ({self._address}) has been silent for {self._heartbeats.seconds:g} s"
                )
                self._fate.end(HUNG, text)

    def _read(self) -> None:
        status = "it closed the stream"
        try:
            for order in self._orders:
                self._heartbeats.record(_LEADER)
                match order.WhichOneof("kind"):
                    case "start":
                        self._has_started.set()
                    case "call":
                        self._calls.put(order.call)
                    case "end":
                        self._fate.end(order.end.exit_code, order.end.reason)
        except grpc.RpcError as error:
            status = _text(error)
        self._is_closed.set()
        self._lose(status)

    def _lose(self, how: str) -> None:
        self._fate.end(LOST, f"host 0 ({self._address}) ended: its connection broke ({how})")


def _text(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
