"""Bearer tokens: reads them from a file, and finds the one that a call carries."""

import hmac
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle_jax.config import ConfigError
from serving.watched_files import WatchedFiles

_LINE = re.compile(r"(\S+)(?:\s+scope=(\S*))?")


class AdminToken(bytes):
    """A token whose callers may also control the engine: update its weights, pause it."""


class TokenFile(Sequence[bytes]):
    """Bearer tokens of a file, one per line: `TOKEN`, or `TOKEN scope=admin`. A token has no white
    space and no `scope=`. Empty lines and lines that begin with # are skipped.

    The file is read again when it changes.

    Raises:
      ConfigError: the file cannot be read, holds no token, or has another line.
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
        stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
        tokens = tuple(self._token(*one) for one in stripped if one[1] and one[1][0] != "#")
        if not tokens:
            raise ConfigError(f"{self._path}: holds no bearer token; write one a line")
        return tokens

    def _token(self, number: int, line: str) -> bytes:
        where, parts = f"{self._path}: line {number}", _LINE.fullmatch(line)
        # A line that is nearly right must not become a token: everyone can guess `scope=admin`. The
        # message may go to a log, so it quotes no token.
        if parts is None or "scope=" in parts[1].lower():
            raise ConfigError(
                f"{where} is neither TOKEN nor TOKEN scope=admin, without other spaces"
            )
        if parts[2] not in (None, "admin"):
            raise ConfigError(f"{where}: scope={parts[2]} is unknown; admin is the only scope")
        token = parts[1].encode()
        return token if parts[2] is None else AdminToken(token)


def token_of(headers: Sequence[str | bytes], tokens: Sequence[bytes]) -> bytes | None:
    """The token of `tokens` that the `authorization` headers of a request carry; None if they carry
    none of them.

    There must be one such header: a proxy that checks the first would vouch for the token of
    another.
    """
    if len(headers) != 1:
        return None
    header = headers[0].encode() if isinstance(headers[0], str) else headers[0]
    scheme, _, given = header.partition(b" ")
    # Compares with every token, so that the time does not reveal a partial match.
    known = [token for token in tokens if hmac.compare_digest(given.strip(), token)]
    return known[0] if known and scheme.lower() == b"bearer" else None
