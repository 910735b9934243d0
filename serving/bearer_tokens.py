"""Bearer tokens: reads them from a file, and finds the one that a call carries."""

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle_jax.config import ConfigError
from serving.watched_files import WatchedFiles


class TokenFile(Sequence[bytes]):
    """Bearer tokens of a file, one per line. Empty lines and lines that begin with # are skipped.

    The file is read again when it changes.

    Raises:
      ConfigError: the file cannot be read, or holds no token.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._file = WatchedFiles(f"the tokens of {path}", [self._path], self._read)

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


def own_token(path: Path) -> tuple[bytes]:
    """The token of a file that only this user can read, which is made if it is missing.

    Processes that start together get one token.

    Raises:
      ConfigError: another user owns the file or can read it, or it cannot be made or read.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(dir=path.parent)  # with mode 0600
        with open(number, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(part, path)  # whole, and never over that of another process
        finally:
            os.unlink(part)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot make the token of the hosts ({error})") from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{path}: must be a file that only this user can read (chmod 600)")
    return tuple(TokenFile(path))


def token_of(headers: Sequence[str | bytes], tokens: Sequence[bytes]) -> bytes | None:
    """The token of `tokens` that the `authorization` headers of a request carry; None if they carry none of them.

    There must be one such header: a proxy that checks the first would vouch for the token of another.
    """
    if len(headers) != 1:
        return None
    header = headers[0].encode() if isinstance(headers[0], str) else headers[0]
    scheme, _, given = header.partition(b" ")
    # Compares with every token, so that the time does not reveal a partial match.
    known = [token for token in tokens if hmac.compare_digest(given.strip(), token)]
    return known[0] if known and scheme.lower() == b"bearer" else None
