"""How tests wait: for an event, with a limit that only a defect reaches."""

import asyncio
import time
from collections.abc import Callable

LIMIT = 300.0
"""Seconds. Generous, because a machine may be busy: a test fails by it only when something hangs.
"""


def eventually(
    condition: Callable[[], object], what: str = "the condition", *, every: float = 0.005
) -> None:
    """Returns once `condition()` is true; fails after `LIMIT` seconds.

    Args:
      what: names the condition in the error.
      every: seconds between two calls; more for a condition that takes time to find out.
    """
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"{what} is not true after {LIMIT:g} s"
        time.sleep(every)


async def soon(condition: Callable[[], object]) -> None:
    """`eventually` for code in an event loop, which goes on meanwhile."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.002)
