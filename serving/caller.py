"""Who calls. Clients with the same bearer token are one caller; on a server without tokens all are one.

A caller sees its own requests only: ids of others are free to it, and it cannot abort them.
"""

import hmac
import secrets
from contextvars import ContextVar

_KEY = secrets.token_bytes(32)
_CURRENT: ContextVar[str] = ContextVar("caller", default="")


def enter(token: bytes | None) -> None:
    """Says whose call the current task serves, and those that it starts; None without tokens."""
    # Not the token: what names a caller may come into logs and error reports.
    _CURRENT.set("" if token is None else hmac.digest(_KEY, token, "sha256").hex())


def current() -> str:
    """The caller that the current task serves."""
    return _CURRENT.get()
