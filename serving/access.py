"""Access to the server: tokens, certificates, ports and limits of connections.

They are checked before jax is imported and weights are loaded, so that mistakes show at once.
"""

import logging
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from peagle_jax.config import ConfigError
from serving.bearer_tokens import TokenFile
from serving.settings import MOST_CONNECTIONS, Settings
from serving.tls import Certificates

RESERVE = 16
"""HTTP connections for health checks, in addition to the limit."""
_OWN_DESCRIPTORS = 128
"""File descriptors that the process itself needs: weights, devices, pipes, compiled programs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Tokens, certificates and limits of connections, for both servers.

    Attributes:
      tokens: valid bearer tokens; if empty, no token is needed.
      certificates: None serves without TLS.
      max_connections: most connections of each port.
      max_per_address: most HTTP connections of one address.
    """

    tokens: Sequence[bytes]
    certificates: Certificates | None
    max_connections: int
    max_per_address: int

    def read_again(self) -> None:
        """Reads tokens and certificates from their files again; invalid files change nothing."""
        files = [one for one in (self.tokens, self.certificates) if hasattr(one, "read_again")]
        for one in files:
            one.read_again()
        if not files:
            _log.info("there are no tokens and no certificates to read again")


def prepare_access(settings: Settings) -> Access:
    """Reads tokens and certificates, tries the ports and raises the limit of file descriptors.

    Raises:
      ConfigError: files that cannot be used, or more connections than descriptors.
      OSError: a port that cannot be used.
    """
    for port in (settings.port, settings.http_port):
        if port >= 0:
            _check_free(settings.host, port)
    tokens = TokenFile(settings.auth_token_file) if settings.auth_token_file else ()
    certificates = None
    if settings.tls_cert is not None:
        certificates = Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    most = _connections(settings.max_connections, 1 if settings.http_port < 0 else 2)
    per_address = settings.max_connections_per_address or -(-most // 2)
    return Access(
        tokens=tokens, certificates=certificates, max_connections=most, max_per_address=per_address
    )


def _connections(asked: int | None, num_ports: int) -> int:
    """Most connections of each port for which there are descriptors."""
    wanted = asked or MOST_CONNECTIONS
    needed = _OWN_DESCRIPTORS + num_ports * (wanted + RESERVE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return wanted
    fits = (soft - _OWN_DESCRIPTORS) // num_ports - RESERVE
    if fits < 1:
        raise ConfigError(
            f"this process may have {soft} file descriptors, too few for any connection: raise the "
            f"limit (ulimit -n) to {_OWN_DESCRIPTORS + num_ports * (1 + RESERVE)} or more"
        )
    if asked is not None and asked > fits:
        raise ConfigError(
            f"max_connections={asked} needs {needed} file descriptors and this process may have "
            f"{soft}: lower it to {fits}, or raise the limit (ulimit -n)"
        )
    return fits


def _check_free(host: str, port: int) -> None:
    """Tries an address, so that gRPC's core does not log a line of its own about it. Port 0 is any
    free one.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (socket.gaierror, UnicodeError) as error:
        rule = f"host={host!r} is no address or name that this machine knows"
        raise OSError(
            f"{rule}; give one of its own, such as 127.0.0.1, or 0.0.0.0 for all"
        ) from error
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
