"""The bytes of tokens: decoders of tokenizer.json, applied to one token at a time."""

import json
import re
from collections.abc import Callable

from peagle_jax.config import ConfigError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 as itself, other bytes from U+0100
    on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in visible} | shifted


_BYTE_LEVEL = _byte_level_alphabet()


class Pieces:
    """Bytes of each token: the decoder of tokenizer.json, applied to one token at a time.

    Decoders in which a token's bytes depend on its neighbours are not supported. One exception: at
    the start of a text `num_stripped` spaces are dropped.
    """

    def __init__(self, decoder: dict | None):
        """`decoder` is its JSON; None: tokens are words, joined by spaces."""
        self._replaced: list[tuple[str, str]] = []
        self._is_byte_level = self._has_byte_tokens = False
        self._prefix = "" if decoder else " "
        self.num_stripped = len(self._prefix)
        stages = [] if decoder is None else decoder.get("decoders", [decoder])
        is_fused = False
        for stage in stages:
            match stage:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replaced.append((old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    self._replaced.append((old, " "))
                    self.num_stripped = int(scheme != "never")
                case {"type": "Strip", "content": " ", "start": count, "stop": 0} if is_fused:
                    self.num_stripped = count
                case _:
                    raise ConfigError(f"decoder {json.dumps(stage)} is not supported")

    def of(self, token: str) -> bytes:
        """The bytes of a token, from its spelling in the vocabulary."""
        for old, new in self._replaced:
            token = token.replace(old, new)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._is_byte_level and all(letter in _BYTE_LEVEL for letter in token):
            return bytes(_BYTE_LEVEL[letter] for letter in token)
        return (self._prefix + token).encode()


class TokenBytes(dict[int, bytes]):
    """Bytes of tokens by id, computed at the first look-up. A known id takes no Python code, which
    counts for every token that is served."""

    def __init__(self, compute: Callable[[int], bytes]):
        super().__init__()
        self._compute = compute

    def __missing__(self, token: int) -> bytes:
        found = self[token] = self._compute(token)
        return found
