"""A tokenizer's files as one archive, for gateways that tokenize by themselves."""

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
_WHEN = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive, on whatever server


@dataclass(frozen=True)
class Archive:
    """A zip file and its fingerprint."""

    content: bytes
    sha256: str


class TokenizerFiles:
    """The archive of a folder, made when it is first asked for."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = asyncio.Lock()
        self._archive: Archive | None = None

    async def archive(self) -> Archive:
        """Raises OSError if a file cannot be read."""
        async with self._lock:
            if self._archive is None:
                self._archive = await asyncio.to_thread(_pack, self._folder)
            return self._archive


def _pack(folder: Path) -> Archive:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _NAMES:
            if (folder / name).is_file():
                info = zipfile.ZipInfo(name, _WHEN)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (folder / name).read_bytes())
    content = buffer.getvalue()
    return Archive(content, hashlib.sha256(content).hexdigest())
