"""Transport security: certificates that are read again when their files change."""

import logging
from pathlib import Path

import grpc

from peagle_jax.config import ConfigError

_log = logging.getLogger(__name__)


class Certificates:
    """A certificate with its key, and the authorities of clients; files are read at every change.

    Args:
      cert, key: PEM files.
      client_ca: PEM file of authorities; with it clients must show a certificate of theirs.

    Raises:
      ConfigError: a file cannot be read.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None = None):
        self._paths = [Path(path) for path in (cert, key, client_ca) if path is not None]
        self._has_ca = client_ca is not None
        try:
            self._seen = self._stamps()
            self._configuration = self._read()
        except OSError as error:
            raise ConfigError(f"TLS: {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ServerCredentials:
        """For a secure port; a handshake after a change of the files uses the new ones."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration, self._fetch, require_client_authentication=self._has_ca
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called at every handshake; None keeps what was used last."""
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return None
            self._configuration = self._read()
            self._seen = stamps
        except OSError as error:
            # Files that are just being replaced: the old certificate serves on.
            _log.warning("TLS files cannot be read, the old ones stay in use: %s", error)
            return None
        _log.info("TLS files have changed and were read again")
        return self._configuration

    def _stamps(self) -> list[tuple[int, int]]:
        return [(stat.st_mtime_ns, stat.st_ino) for stat in map(Path.stat, self._paths)]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert, key, *ca = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration(
            [(key, cert)], root_certificates=ca[0] if ca else None
        )
