"""Packs the files of a tokenizer into an archive, for gateways that tokenize themselves."""

import asyncio
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "config.json", "generation_config.json"),
)
_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same files make the same archive on every server


@dataclass(frozen=True)
class Archive:
    """A zip file and its fingerprint."""

    content: bytes
    sha256: str


class TokenizerFiles:
    """The archive of a folder; it is made at the first request."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = asyncio.Lock()
        self._archive: Archive | None = None

    async def archive(self) -> Archive:
        """The archive.

        Raises:
          OSError: a file cannot be read.
        """
        async with self._lock:
            if self._archive is None:
                self._archive = await asyncio.to_thread(_pack, self._folder)
            return self._archive


def _pack(folder: Path) -> Archive:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _NAMES:
            if (folder / name).is_file():
                info = zipfile.ZipInfo(name, _DATE)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (folder / name).read_bytes())
    content = buffer.getvalue()
    return Archive(content, hashlib.sha256(content).hexdigest())
