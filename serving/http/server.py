"""The HTTP server: uvicorn within the running event loop, behind a listener with limits."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from serving.frontend import Frontend
from serving.http.app import make_app
from serving.http.connection import Connection, Patience
from serving.http.gate import Gate, Visit
from serving.http.listener import Listener
from serving.tls import Certificates

_BACKLOG = 2048


class _Uvicorn(uvicorn.Server):
    """Accepts connections through `Listener`. Signals are the application's, not uvicorn's."""

    def __init__(self, config: uvicorn.Config, gate: Gate, patience: Patience):
        super().__init__(config)
        self._gate, self._patience = gate, patience

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which would let asyncio accept."""
        self.servers = [
            Listener(
                one,
                self._make_protocol,
                context=self.config.ssl,
                gate=self._gate,
                handshake_seconds=self._patience.head,
            )
            for one in sockets or ()
        ]
        self.started = True

    def _make_protocol(self, visit: Visit) -> Connection:
        return Connection(
            self.config, self.server_state, gate=self._gate, visit=visit, patience=self._patience
        )


class HttpServer:
    """All HTTP routes over one frontend.

    Args:
      frontend: may still be starting.
      tokens: bearer tokens that let clients in; empty lets everybody in. Health is open to all.
      certificates: None serves without TLS.
      max_message_bytes: of a request's body.
      allowed_hosts: names that a request's Host may have; None allows all.
      idle_seconds: how long a connection without requests is kept.
      gate: limits of connections.
      patience: limits of what a client may keep a connection waiting for.
    """

    def __init__(
        self,
        frontend: Frontend,
        *,
        tokens: Sequence[bytes] = (),
        certificates: Certificates | None = None,
        max_message_bytes: int = 8 << 20,
        allowed_hosts: Sequence[str] | None = None,
        idle_seconds: float = 300.0,
        gate: Gate | None = None,
        patience: Patience | None = None,
    ):
        self._config = uvicorn.Config(
            make_app(
                frontend, tokens=tokens, max_bytes=max_message_bytes, allowed_hosts=allowed_hosts
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
        if certificates is not None:
            self._config.ssl = certificates.context()
        gate = gate or Gate(most=2048, most_per_address=1024)
        self._server = _Uvicorn(self._config, gate, patience or Patience())
        self._task: asyncio.Task | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port.

        Raises:
          OSError: the address cannot be had.
        """
        listener = _listen(host, port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not (self._server.started or self._task.done()):
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task
        return listener.getsockname()[1]

    async def stop(self, grace: float) -> None:
        """Takes no more requests, and cancels those that run after `grace` seconds."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = grace
        self._server.should_exit = True
        await self._task


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        # gRPC takes IPv4 too when it is told to listen on "::".
        both = host == "::" and socket.has_dualstack_ipv6()
        made = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    made.setblocking(False)
    return made
