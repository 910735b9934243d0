"""Who may call: certificates and bearer tokens, read again when their files change.

Both can be rotated without a restart, by SIGHUP too. Invalid replacements are ignored: what was read last
stays in use, and the log says what is wrong with them.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from peagle_jax.config import ConfigError

_log = logging.getLogger(__name__)


class _Watched[T]:
    """What `read` makes of some files, made anew when they change.

    Args:
      what: for the log.
      paths: replaced, rewritten or pointed elsewhere: a change of any of them counts.
      read: raises `ConfigError` for files that cannot be used.

    Raises:
      ConfigError: see `read`.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]):
        self._what, self._paths, self._read = what, paths, read
        self._lock = threading.Lock()  # TLS handshakes ask from threads of gRPC
        self._seen = self._stamps()
        self._value = read()

    def value(self) -> T:
        """The newest that could be read."""
        with self._lock:
            if self._stamps() != self._seen:
                self._renew()
            return self._value

    def read_again(self) -> None:
        """Reads the files whether or not they have changed."""
        with self._lock:
            self._renew()

    def _renew(self) -> None:
        self._seen = self._stamps()
        try:
            self._value = self._read()
        except ConfigError as error:
            _log.warning("%s cannot be read again, the old ones stay in use: %s", self._what, error)
        else:
            _log.info("%s were read again", self._what)

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


@dataclass(frozen=True)
class _Pems:
    cert: bytes
    key: bytes
    ca: bytes | None
    context: ssl.SSLContext


class Certificates:
    """A certificate with its key, and the authorities of clients.

    Args:
      cert, key: PEM files.
      client_ca: PEM file of authorities; with it clients must show a certificate of theirs.

    Raises:
      ConfigError: a file cannot be read, holds no PEM, or key and certificate are no pair.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None = None):
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = [Path(path) for path in (cert, key, client_ca) if path is not None]
        self._files = _Watched("TLS files", paths, self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """For a secure port; a handshake after a change of the files uses the new ones."""
        given = self._files.value()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called at every handshake; None keeps what was used last."""
            nonlocal given
            newest = self._files.value()
            if newest is given:
                return None
            given = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            fetch,
            require_client_authentication=self._client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """The same for a server of asyncio."""
        listening = self._files.value().context

        def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            """Called at every handshake, whether or not the client names a host."""
            connection.context = self._files.value().context

        listening.sni_callback = renew
        return listening

    def read_again(self) -> None:
        """Reads the files now, for the next handshakes."""
        self._files.read_again()

    def _read(self) -> _Pems:
        """gRPC would take anything, and then fail at every handshake: check first."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            where = f"{self._cert} and {self._key}"
            context.load_cert_chain(self._cert, self._key, password=_refuse_password)
            if self._client_ca is not None:
                where = self._client_ca
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            ca = None if self._client_ca is None else Path(self._client_ca).read_bytes()
            cert, key = Path(self._cert).read_bytes(), Path(self._key).read_bytes()
            return _Pems(cert, key, ca, context)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"TLS: {where}: {_reason(error)}") from error


def _configuration(pems: _Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def _refuse_password() -> str:
    raise ConfigError("the key is encrypted; give one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is not this certificate's" if mismatch else f"not PEM ({error.reason})"
    return getattr(error, "strerror", None) or str(error)


class TokenFile(Sequence[bytes]):
    """Bearer tokens of a file, one a line; empty lines and lines that begin with # do not count.

    Raises:
      ConfigError: no such file, or no token in it.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._file = _Watched(f"the tokens of {path}", [self._path], self._read)

    def __len__(self) -> int:
        return len(self._file.value())

    def __getitem__(self, index):
        return self._file.value()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file.value())

    def read_again(self) -> None:
        """Reads the file now."""
        self._file.read_again()

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path}: cannot read the bearer tokens ({error})") from error
        stripped = (line.strip() for line in lines)
        tokens = tuple(line.encode() for line in stripped if line and not line.startswith("#"))
        if not tokens:
            raise ConfigError(f"{self._path}: holds no bearer token; write one a line")
        return tokens
