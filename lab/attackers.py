"""The process of hostile clients, separate from the measuring process: `python -m lab.attackers`.

It reads a JSON object from standard input (see `Attackers`), prepares its requests, writes "ready",
waits for a line, runs, and writes its results as JSON: one object per attack.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lab.attacks import ATTACKS, Attack
from lab.attempts import Attempt, Target
from lab.raw_connections import Address

_MAX_CLIENTS = 64
_LONGEST = 60.0  # seconds that an attempt waits for its answer
_NICE = 19  # scheduling priority below the server's
_TURNED_AWAY = frozenset({"closed", "UNAVAILABLE"})
"""Valid answers to any request while other attacks use up all connections."""


class Attackers:
    """Handle of the attacker process, for the measuring process.

    Args:
      names: attacks to run at the same time.
      http, grpc: "host:port" of the server.
      token, victim: as in `Target`.
      seconds: no attempt starts after this time.
      hold_seconds: as in `Target`.
      scale: share of each attack's attempts to make, at most 1.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        http: str,
        grpc: str,
        token: str,
        victim: str,
        seconds: float,
        hold_seconds: float,
        scale: float = 1.0,
    ):
        task = dict(
            names=list(names),
            http=http,
            grpc=grpc,
            token=token,
            victim=victim,
            seconds=seconds,
            hold_seconds=hold_seconds,
            scale=scale,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.attackers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self._limit = seconds + hold_seconds + _LONGEST + 60.0
        self._send_line(json.dumps(task))
        line = self._process.stdout.readline()
        if line.strip() != "ready":
            raise RuntimeError(f"hostile clients did not start: {line!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self) -> None:
        """Starts the attacks."""
        self._send_line("go")

    def results(self) -> dict:
        """Waits for the end: {"attacks": {name: {"attempts", "answers", "wrong"}},
        "cpu_seconds"}."""
        out, _ = self._process.communicate(timeout=self._limit)
        return json.loads(out)

    def _send_line(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


def _share(attacks: Sequence[Attack]) -> list[int]:
    """Clients of each attack, at most `_MAX_CLIENTS` together."""
    each = max(1, _MAX_CLIENTS // len(attacks))
    return [min(attack.clients, each) if len(attacks) > 1 else attack.clients for attack in attacks]


async def _run(attack: Attack, attempt: Attempt, *, clients: int, task: dict) -> dict:
    answers: Counter[str] = Counter()
    numbers = iter(range(max(1, round(task["scale"] * attack.count))))
    until = time.monotonic() + task["seconds"]

    async def client() -> None:
        for _ in numbers:
            if time.monotonic() > until:
                return
            answers[await _answer(attempt, _LONGEST + task["hold_seconds"])] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    right = attack.right | (_TURNED_AWAY if len(task["names"]) > 1 else set())
    wrong = sum(number for answer, number in answers.items() if answer not in right)
    return {"attempts": answers.total(), "answers": dict(answers), "wrong": wrong}


async def _answer(attempt: Attempt, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            return await attempt()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return type(error).__name__


async def _attack(attacks: Sequence[Attack], attempts: Sequence[Attempt], task: dict) -> dict:
    running = {
        attack.name: asyncio.create_task(_run(attack, attempt, clients=clients, task=task))
        for attack, attempt, clients in zip(attacks, attempts, _share(attacks), strict=True)
    }
    return {name: await one for name, one in running.items()}


def main() -> None:
    """Entry point."""
    os.nice(_NICE)
    task = json.loads(sys.stdin.readline())
    target = Target(
        http=Address.of(task["http"]),
        grpc=Address.of(task["grpc"]),
        token=task["token"],
        victim=task["victim"],
        hold_seconds=task["hold_seconds"],
    )
    attacks = [attack for attack in ATTACKS if attack.name in task["names"]]
    attempts = [attack.prepare(target) for attack in attacks]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    before = used()
    found = asyncio.run(_attack(attacks, attempts, task))
    json.dump({"attacks": found, "cpu_seconds": used() - before}, sys.stdout)


if __name__ == "__main__":
    main()
