"""TLS: the server's certificate and key, and the authorities of its clients.

A server reads the files again when they change, so certificates are rotated without a restart.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from peagle_jax.config import ConfigError
from serving.watched_files import WatchedFiles


@dataclass(frozen=True)
class Pems:
    """Contents of the files, and an SSL context with them."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    context: ssl.SSLContext


class Certificates:
    """A certificate with its key, and the authorities of clients.

    Args:
      cert, key: PEM files.
      client_ca: PEM file of authorities; clients must then present a certificate of one of them.

    Raises:
      ConfigError: a file cannot be read or holds no PEM, or the key does not belong to the
        certificate.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None = None):
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = [Path(path) for path in (cert, key, client_ca) if path is not None]
        self._files = WatchedFiles("TLS files", paths, self._read)

    @property
    def needs_client_certificate(self) -> bool:
        """Whether clients must present a certificate."""
        return self._client_ca is not None

    def newest(self) -> Pems:
        """The newest valid files."""
        return self._files.value()

    def context(self) -> ssl.SSLContext:
        """An SSL context with the newest files, for one connection that was just accepted.

        A context owns the keys of its session tickets, so a ticket of older files resumes no
        session: its client would not show a certificate again, which may be of an authority that
        was removed.
        """
        return self._files.value().context

    def read_again(self) -> None:
        """Reads the files now, for the next handshakes."""
        self._files.read_again()

    def _read(self) -> Pems:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return _read(context, self._cert, self._key, self._client_ca)


def _read(context: ssl.SSLContext, cert: str | None, key: str | None, ca: str | None) -> Pems:
    """The files, checked by `context`: gRPC accepts any bytes, and then every handshake fails."""
    where = f"{cert} and {key}"
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password=_refuse_password)
        where = ca
        if ca is not None:
            context.load_verify_locations(ca)
        contents = (None if path is None else Path(path).read_bytes() for path in (cert, key, ca))
        return Pems(*contents, context)
    except (OSError, ConfigError) as error:
        raise ConfigError(f"TLS: {where}: {_reason(error)}") from error


def _refuse_password() -> str:
    raise ConfigError("the key is encrypted; give one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is not this certificate's" if mismatch else f"not PEM ({error.reason})"
    return getattr(error, "strerror", None) or str(error)
