"""Certificates for tests, made by the `openssl` command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_EXTENSIONS = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: str
    key: str

    def bytes(self) -> tuple[bytes, bytes]:
        """Bytes of both files."""
        return Path(self.cert).read_bytes(), Path(self.key).read_bytes()


def authority(folder: Path, name: str) -> Pair:
    """An authority that signed itself."""
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    _openssl(f"req -x509 {_NEW_KEY} -keyout {pair.key} -out {pair.cert} -days 2 -subj /CN={name}")
    return pair


def signed(folder: Path, name: str, by: Pair) -> Pair:
    """A certificate for localhost and for clients, signed by an authority."""
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    request = folder / f"{name}.csr"
    extensions = folder / "extensions"
    extensions.write_text(_EXTENSIONS)
    _openssl(f"req -new {_NEW_KEY} -keyout {pair.key} -out {request} -subj /CN={name}")
    _openssl(
        f"x509 -req -in {request} -CA {by.cert} -CAkey {by.key} -CAcreateserial"
        f" -out {pair.cert} -days 2 -extfile {extensions}"
    )
    return pair


_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def _openssl(arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)
