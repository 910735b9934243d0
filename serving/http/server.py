"""The HTTP server: uvicorn within the running event loop, behind a listener with limits.

What is our own stands here because no option of a library does it before work is done (uvicorn
0.54, hypercorn, granian): uvicorn's `limit_concurrency` counts requests that were accepted and
parsed, and no server counts connections by address (`gate`); asyncio's listener logs each accept
that fails for lack of descriptors, up to the backlog in a turn (`listener`); `timeout_keep_alive`
starts anew with each byte, and nothing limits the time of a head or of a reader that stalls
(`connection`); h11 takes heads that a proxy may read in another way (`find_fault`); a connection
that is closed while the client sends is reset, and the answer, such as 413, lost with it
(`LingeringTransport`).
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from serving.frontend import Frontend
from serving.http.app import make_app
from serving.http.connection import Connection, TimeLimits
from serving.http.gate import Gate, Slot
from serving.http.listener import Listener
from serving.tls import Certificates

# Connections that wait to be accepted. Where more wait, the kernel drops what clients send, and
# they repeat it after 0.2 s. The kernel's own limit is net.core.somaxconn, 4096 by default.
_BACKLOG = 4096


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that accepts connections through `Listener`, and leaves signals to the
    application.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        certificates: Certificates | None,
        gate: Gate,
        time_limits: TimeLimits,
    ):
        super().__init__(config)
        self._context = None if certificates is None else certificates.context
        self._gate, self._time_limits = gate, time_limits

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's method, which accepts through asyncio's server."""
        self.servers = [
            Listener(
                one,
                self._make_protocol,
                context=self._context,
                gate=self._gate,
                handshake_seconds=self._time_limits.head,
            )
            for one in sockets or ()
        ]
        self.started = True

    def _make_protocol(self, slot: Slot) -> Connection:
        return Connection(
            self.config,
            self.server_state,
            gate=self._gate,
            slot=slot,
            time_limits=self._time_limits,
        )


class HttpServer:
    """All HTTP routes over one frontend.

    Args:
      frontend: it may still be starting.
      tokens: valid bearer tokens; if empty, no token is needed. Health never needs one.
      certificates: None serves without TLS.
      max_message_bytes: most bytes of a request's body.
      allowed_hosts: allowed names in the Host header; None allows all.
      allowed_origins: see `make_app`.
      with_page: whether `/` leads to the page.
      idle_seconds: how long a connection without requests stays open.
      gate: limits of connections.
      time_limits: time limits of a client.
    """

    def __init__(
        self,
        frontend: Frontend,
        *,
        tokens: Sequence[bytes] = (),
        certificates: Certificates | None = None,
        max_message_bytes: int = 8 << 20,
        allowed_hosts: Sequence[str] | None = None,
        allowed_origins: Sequence[str] = (),
        with_page: bool = True,
        idle_seconds: float = 300.0,
        gate: Gate | None = None,
        time_limits: TimeLimits | None = None,
    ):
        self._config = uvicorn.Config(
            make_app(
                frontend,
                tokens=tokens,
                max_bytes=max_message_bytes,
                allowed_hosts=allowed_hosts,
                allowed_origins=allowed_origins,
                with_page=with_page,
            ),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=idle_seconds,
        )
        self._config.load()
        gate = gate or Gate(most=2048, most_per_address=1024)
        self._server = _Uvicorn(self._config, certificates, gate, time_limits or TimeLimits())
        self._task: asyncio.Task | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port.

        Raises:
          OSError: the address cannot be used.
        """
        listener = _listen(host, port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not (self._server.started or self._task.done()):
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task
        return listener.getsockname()[1]

    async def stop(self, grace: float) -> None:
        """Accepts no more requests, and after `grace` seconds cancels the rest."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = grace
        self._server.should_exit = True
        await self._task


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        # As gRPC does, which also accepts IPv4 on "::".
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    # Accepted connections inherit it. Without it a small message waits up to 40 ms for the ACK of
    # the one before; asyncio sets it only for sockets with an explicit protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
