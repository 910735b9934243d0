"""Host 0 of several: it compares the other hosts with itself, and sends them its device calls."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from peagle_jax.config import ConfigError
from peagle_jax.engine.device.device_calls import DeviceCall
from serving.bearer_tokens import token_of
from serving.hosts import BEATS, HUNG, LOST, Fate, Heartbeats, difference
from serving.protos import hosts_v1_pb2 as pb
from serving.protos import hosts_v1_pb2_grpc
from serving.rpc.device_calls import to_message

_log = logging.getLogger(__name__)
_LAST_SECONDS = 5.0
"""For the last message to the followers, whose connections then close."""
_ATTEMPTS = 8  # streams of hosts that are refused, at a time


class _Stream:
    """The stream of one follower."""

    def __init__(self, host: int, peer: str):
        self.host, self.peer = host, peer
        self.orders: queue.SimpleQueue[pb.Order | None] = queue.SimpleQueue()
        self.devices: pb.Devices | None = None
        self.num_calls = 0
        self.is_closed = threading.Event()


class Leader(hosts_v1_pb2_grpc.HostsServicer):
    """The streams of all followers.

    Args:
      num_hosts: this one included.
      identity: what must be equal on all hosts, see `hosts.identity`.
      tokens: of which a follower must send one; if empty, none is needed.
      seconds: see `Heartbeats`; also the longest time of a round.
      fate: of this process.
      credentials: of TLS; None listens without.
    """

    def __init__(
        self,
        num_hosts: int,
        identity: Mapping[str, str],
        *,
        tokens: Sequence[bytes],
        seconds: float,
        fate: Fate,
        credentials: grpc.ServerCredentials | None = None,
    ):
        self._credentials = credentials
        self._num_hosts, self._identity, self._tokens = num_hosts, identity, tokens
        self._fate, self._heartbeats = fate, Heartbeats(seconds)
        self._streams: dict[int, _Stream] = {}
        self._changed = threading.Condition()
        self._num_calls = 0
        self._numbering = threading.Lock()
        self._on_stop: Callable[[], None] | None = None
        self._has_stop_signal = False
        self._busy_seconds: Callable[[], float] = lambda: 0.0
        pool = ThreadPoolExecutor(num_hosts + _ATTEMPTS, thread_name_prefix="follower")
        self._server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        hosts_v1_pb2_grpc.add_HostsServicer_to_server(self, self._server)

    def start(self, host: str, port: int) -> int:
        """Listens, and returns the port.

        Raises:
          OSError: the address cannot be used.
        """
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}; is another server there?") from error
        self._server.start()
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()
        return port

    def wait_for_hosts(self, seconds: float) -> None:
        """Returns when all followers have connected and equal this host.

        Raises:
          ConfigError: one is missing after `seconds`.
        """
        self._wait(seconds, lambda one: True, "has not connected")

    def welcome(self, jax_address: str) -> None:
        """Has all followers connect to jax's coordination service, which must listen there soon."""
        self._order(pb.Order(welcome=pb.Welcome(jax_address=jax_address)))

    def check_devices(self, kind: str, count: int, seconds: float) -> None:
        """Returns when all followers have reported `count` or more devices of this kind, and starts them.

        Raises:
          ConfigError: one has others, or has not reported after `seconds`.
        """
        self._wait(seconds, lambda one: one.devices is not None, "has not found its devices")
        for one in self._streams.values():
            if one.devices.kind != kind or one.devices.count < count:
                raise ConfigError(
                    f"host {one.host} has {one.devices.count} devices of {one.devices.kind}, and "
                    f"host 0 needs {count} of {kind} on each host"
                )
        self._order(pb.Order(start=pb.Start()))

    def send(self, call: DeviceCall) -> None:
        """Sends a call to all followers; they perform calls in the order of `send`."""
        with self._numbering:
            self._num_calls += 1
            self._order(pb.Order(call=to_message(call, self._num_calls)))

    def watch_rounds(self, busy_seconds: Callable[[], float]) -> None:
        """Ends all processes if a round takes too long.

        Args:
          busy_seconds: see `messages.Worker`.
        """
        self._busy_seconds = busy_seconds

    def call_on_stop(self, stop: Callable[[], None]) -> None:
        """Calls `stop` when a follower receives a signal to stop, or at once if one has received it already."""
        self._on_stop = stop
        if self._has_stop_signal:
            stop()

    def end(self, code: int, reason: str, others: int = LOST) -> None:
        """Ends this process with exit code `code`, and all others with `others`; it does not return."""
        self._fate.end(code, reason, lambda code, reason: self._notify(others, reason))

    def wait_for_blame(self) -> None:
        """See `Fate.wait_for_blame`."""
        self._fate.wait_for_blame()

    def close(self) -> None:
        """Ends all streams without a message: for a process that goes on."""
        for stream in tuple(self._streams.values()):
            stream.orders.put(None)
        self._server.stop(None)

    def Follow(self, request_iterator: Iterator[pb.Report], context) -> Iterator[pb.Order]:
        """See the proto."""
        headers = [value for key, value in context.invocation_metadata() if key == "authorization"]
        if self._tokens and token_of(headers, self._tokens) is None:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "this host's token is not known to host 0"
            )
        hello = next(request_iterator, pb.Report()).hello
        stream = self._joined(hello, context)
        self._heartbeats.record(stream.host)
        reader = threading.Thread(target=self._read, args=(stream, request_iterator), daemon=True)
        reader.start()
        while (order := stream.orders.get()) is not None:
            yield order

    def _joined(self, hello: pb.Hello, context) -> _Stream:
        """The stream of a follower that fits, or the end of its call."""
        host, refusal = hello.host, None
        if not 1 <= host < self._num_hosts:
            refusal = f"host-index must be between 1 and {self._num_hosts - 1}"
        elif mismatch := difference(self._identity, dict(hello.identity)):
            refusal = f"all hosts must be equal, and {mismatch}"
        with self._changed:
            if refusal is None and host in self._streams:
                refusal = f"another process is host {host} already: {self._streams[host].peer}"
            if refusal is None:
                stream = self._streams[host] = _Stream(host, context.peer())
                self._changed.notify_all()
        if refusal is not None:
            _log.warning("host %d (%s) is refused: %s", host, context.peer(), refusal)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"host {host} is refused: {refusal}")
        _log.info("host %d has connected (%s)", host, stream.peer)
        return stream

    def _read(self, stream: _Stream, reports: Iterator[pb.Report]) -> None:
        reason, code = "its connection broke", LOST
        try:
            for report in reports:
                self._heartbeats.record(stream.host)
                match report.WhichOneof("kind"):
                    case "devices":
                        with self._changed:
                            stream.devices = report.devices
                            self._changed.notify_all()
                    case "alive":
                        stream.num_calls = report.alive.num_calls
                    case "stop":
                        self._stop()
                    case "end":
                        reason = report.end.reason
        except grpc.RpcError:
            pass  # the stream broke
        stream.is_closed.set()
        stream.orders.put(None)
        self.end(code, f"host {stream.host} ({stream.peer}) ended: {reason}")

    def _stop(self) -> None:
        self._has_stop_signal = True
        if self._on_stop is not None:
            self._on_stop()

    def _wait(self, seconds: float, holds: Callable[[_Stream], bool], what: str) -> None:
        hosts = range(1, self._num_hosts)
        missing = lambda: [
            host for host in hosts if host not in self._streams or not holds(self._streams[host])
        ]
        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), seconds):
                raise ConfigError(f"host {missing()[0]} {what} within {seconds:g} s")

    def _order(self, order: pb.Order) -> None:
        for stream in tuple(self._streams.values()):
            stream.orders.put(order)

    def _notify(self, code: int, reason: str) -> None:
        """The last message of all streams, and their end."""
        self._order(pb.Order(end=pb.End(exit_code=code, reason=reason)))
        until = time.monotonic() + _LAST_SECONDS
        for stream in tuple(self._streams.values()):
            if self._heartbeats.silent() != stream.host:
                stream.is_closed.wait(max(0.0, until - time.monotonic()))

    def _watch(self) -> None:
        beat = min(1.0, self._heartbeats.seconds / BEATS)
        while not self._fate.is_sealed.wait(beat):
            self._order(pb.Order(alive=pb.Alive(num_calls=self._num_calls)))
            if (host := self._heartbeats.silent()) is not None:
                text = f"host {host} has been silent for {self._heartbeats.seconds:g} s"
                self.end(HUNG, text, HUNG)
            if self._busy_seconds() > self._heartbeats.seconds:
                counts = ", ".join(f"host {h}: {s.num_calls}" for h, s in self._streams.items())
                text = f"no result within {self._heartbeats.seconds:g} s of call {self._num_calls}"
                self.end(HUNG, f"{text} (calls dispatched by {counts})", HUNG)
