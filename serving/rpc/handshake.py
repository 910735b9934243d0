"""The first connection to host 0, which finds out why later ones would fail.

gRPC tries to connect again and again, and does not say why it fails: a certificate that is not accepted would look
like a host that has not started yet.
"""

import socket
import ssl
import time

from peagle_jax.config import ConfigError
from serving.option_types import address

_SECONDS = 10.0
"""Longest time of one connection, and of each answer."""
_PAUSE = 0.5  # seconds between two connections
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an HTTP/2 frame without values


def wait_for_leader(where: str, context: ssl.SSLContext | None, seconds: float) -> None:
    """Returns when host 0 listens at "host:port" and accepts connections of this kind.

    Args:
      context: of TLS; None connects without.

    Raises:
      ConfigError: host 0 does not listen after `seconds`, or the two ends differ in TLS or refuse a certificate.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(address(where), _SECONDS) as connection:
                refusal = _refusal(connection, where, context)
                break
        except OSError as error:
            if time.monotonic() + _PAUSE > until:
                text = f"host 0 at {where} has not answered within {seconds:g} s"
                raise ConfigError(f"{text} ({error})") from error
        time.sleep(_PAUSE)
    if refusal is not None:
        raise ConfigError(f"host 0 at {where} {refusal}")


def _refusal(connection: socket.socket, where: str, context: ssl.SSLContext | None) -> str | None:
    """Why gRPC could not use the connection; None if it can.

    Raises:
      OSError: host 0 does not answer.
    """
    if context is None:
        if _answers(connection):
            return None
        return "uses TLS: give hosts-tls-ca, and a certificate if it asks for one"
    try:
        with context.wrap_socket(connection, server_hostname=address(where)[0]) as secure:
            # It refuses a certificate after the handshake, with an alert or without.
            if _answers(secure):
                return None
            reason = "it closes the connection"
    except ssl.SSLCertVerificationError as error:
        return f"has a certificate that hosts-tls-ca does not verify: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "uses no TLS: leave hosts-tls-ca out, or give host 0 a certificate"
        reason = error.reason
    wanted = "give hosts-tls-cert and hosts-tls-key that its hosts-tls-ca verifies"
    return f"does not accept the certificate of this host ({reason}): {wanted}"


def _answers(connection: socket.socket) -> bool:
    """Whether the other end begins a connection of HTTP/2, as gRPC does at once."""
    try:
        connection.sendall(_PREFACE + _SETTINGS)
        return connection.recv(9)[3:4] == b"\4"  # the type of a frame: SETTINGS
    except ConnectionError:
        return False
