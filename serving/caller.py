"""The caller of the current task, and when its request arrived.

Clients with the same bearer token are one caller; on a server without tokens all clients are one. A
caller sees its own requests only: it may use the ids of others, and it cannot abort them.
"""

import hmac
import secrets
import time
from contextvars import ContextVar

from serving.bearer_tokens import AdminToken
from serving.errors import Code, ServiceError

_KEY = secrets.token_bytes(32)
_CURRENT: ContextVar[str] = ContextVar("caller", default="")
_IS_ADMIN: ContextVar[bool] = ContextVar("is_admin", default=False)
_ARRIVAL: ContextVar[float | None] = ContextVar("arrival", default=None)


def enter(token: bytes | None) -> None:
    """Sets the caller of the current task, and of those that it starts; its request arrives now.

    Args:
      token: the caller's bearer token; None without tokens.
    """
    # Not the token: what names a caller may come into logs and error reports.
    arrive()
    _IS_ADMIN.set(isinstance(token, AdminToken))
    _CURRENT.set("" if token is None else hmac.digest(_KEY, token, "sha256").hex())


def arrive() -> None:
    """Sets the arrival to now: a call may carry many requests."""
    _ARRIVAL.set(time.monotonic())


def current() -> str:
    """The caller of the current task."""
    return _CURRENT.get()


def check_admin() -> None:
    """Refuses the current caller unless its token has the admin scope.

    Raises:
      ServiceError: PERMISSION_DENIED.
    """
    if not _IS_ADMIN.get():
        rule = "needs a token with the admin scope: TOKEN scope=admin in the file of the tokens"
        raise ServiceError(Code.PERMISSION_DENIED, rule)


def arrival() -> float:
    """`time.monotonic()` at which the request of the current task arrived; now if none did."""
    arrived = _ARRIVAL.get()
    return time.monotonic() if arrived is None else arrived
