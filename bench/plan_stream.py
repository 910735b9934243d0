"""Times the stream of device calls between hosts: `python -m bench.plan_stream`, without a device and a model.

Leader and follower are threads of one process on one machine, connected over loopback. So the times hold what
both sides compute and nothing of a network.
"""

import logging
import queue
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np

from peagle_jax.engine.device.device_calls import Run
from peagle_jax.engine.host.calls import RoundShape
from serving.hosts import Fate
from serving.rpc.follower import LeaderStream
from serving.rpc.leader import Leader

_CALLS = 1000
_PAUSE = 0.002  # seconds between two calls: rounds take longer
_WORDS = {"the plan of the call before": 0, "a round of 32 rows, 2048 tokens": 32 * (128 + 11)}
_WORDS["a prefill of 4 x 512 tokens"] = 4 * (512 + 128 + 14)


def measure(num_words: int, num_followers: int) -> tuple[float, float, float]:
    """Microseconds of `Leader.send`, and the median and the 99th percentile from there to the last follower's thread.

    Args:
      num_words: int32 numbers of the plan; 0: it is not sent again.
    """
    leader = Leader(num_followers + 1, {}, tokens=(), seconds=60.0, fate=Fate(0, _wait))
    address = f"127.0.0.1:{leader.start('127.0.0.1', 0)}"
    arrived: queue.SimpleQueue[float] = queue.SimpleQueue()
    follower = SimpleNamespace(perform=lambda call: arrived.put(time.perf_counter()))
    for host in range(1, num_followers + 1):
        stream = LeaderStream(host, address, {}, token=None, seconds=60.0, fate=Fate(host, _wait))
        threading.Thread(target=_follow, args=(stream, follower), daemon=True).start()
    leader.wait_for_hosts(60.0)
    leader.welcome("none")
    plan = np.zeros(num_words, np.int32) if num_words else None
    sending, delays = [], []
    for _ in range(_CALLS):
        start = time.perf_counter()
        leader.send(Run(RoundShape(32, 7), plan, None))
        sending.append(time.perf_counter() - start)
        delays.append(max(arrived.get() for _ in range(num_followers)) - start)
        time.sleep(_PAUSE)
    leader.close()
    delays.sort()
    spent = (statistics.median(sending), statistics.median(delays), delays[int(0.99 * _CALLS)])
    return tuple(1e6 * seconds for seconds in spent)


def _wait(code: int) -> None:
    threading.Event().wait()


def _follow(stream: LeaderStream, follower: SimpleNamespace) -> None:
    stream.join(60.0)
    stream.perform(follower)


def main() -> int:
    """Prints one line for each size and number of followers."""
    logging.disable()  # each follower says that its leader has ended
    for what, num_words in _WORDS.items():
        for num_followers in (1, 3):
            send, median, late = measure(num_words, num_followers)
            hosts = f"{num_followers + 1} hosts"
            print(
                f"{what}, {4 * num_words} bytes, {hosts}: send {send:.0f} us, there after {median:.0f} us (99 %: {late:.0f} us)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
