"""Connects the processes of several hosts: host 0 leads, the others follow."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

from peagle_jax import ConfigError, Engine
from peagle_jax.parallel import processes
from serving.bearer_tokens import TokenFile
from serving.hosts import FAILED, REFUSED, Fate, identity
from serving.option_types import address
from serving.rpc.follower import LeaderStream
from serving.rpc.leader import Leader
from serving.settings import Settings

_log = logging.getLogger(__name__)


def lead(settings: Settings, say: Callable[[str], None]) -> Leader:
    """The leader, once all hosts are connected. Their engines are still to be made.

    Raises:
      ConfigError: options that contradict each other, or a host is missing or has other devices.
      OSError: an address that cannot be used.
    """
    host, port = address(settings.coordinator)
    fate = Fate(0)
    leader = Leader(
        settings.num_hosts,
        identity(settings),
        tokens=_tokens(settings),
        seconds=settings.hosts_seconds,
        fate=fate,
    )
    found = leader.start(host, port)
    say(f"hosts connect to {host}:{found}")
    with failures_end_all(leader.fail):
        leader.wait_for_hosts(settings.hosts_start_seconds)
        # Port 0 stands for any free one, for jax too.
        jax_address = f"{host}:{port + 1 if port else _free_port(host)}"
        leader.welcome(jax_address)
        kind, count = _connect(settings, jax_address, fate)
        if count < settings.devices_per_host:
            needed = f"{settings.devices_per_host} are needed"
            raise ConfigError(f"host 0 has {count} devices of {kind}, and {needed}")
        leader.check_devices(kind, settings.devices_per_host, settings.hosts_start_seconds)
    return leader


@contextlib.contextmanager
def failures_end_all(end: Callable[[int, str], None]) -> Iterator[None]:
    """Ends the processes of all hosts where the block raises: an interpreter that exits waits for the others.

    Args:
      end: called with the exit code of this process and the reason; it does not return.
    """
    try:
        yield
    except (ConfigError, OSError) as error:
        end(REFUSED, " ".join(str(error).split()))
    except Exception as error:
        _log.exception("this host failed")
        end(FAILED, " ".join(str(error).split()))


def follow(settings: Settings, make_engine: Callable[[Settings], Engine]) -> None:
    """Repeats the leader's calls until the process ends; it does not return.

    Raises:
      ConfigError: the leader refuses this host, or weights or sizes cannot be used.
      OSError: a file that cannot be read.
    """
    fate, tokens = Fate(settings.host_index), _tokens(settings)
    stream = LeaderStream(
        settings.host_index,
        settings.coordinator,
        identity(settings),
        token=tokens[0] if tokens else None,
        seconds=settings.hosts_seconds,
        fate=fate,
    )
    jax_address = stream.join(settings.hosts_start_seconds)
    with failures_end_all(stream.end):
        stream.report_devices(*_connect(settings, jax_address, fate))
        stream.follow(make_engine(settings).follower())


def _connect(settings: Settings, jax_address: str, fate: Fate) -> tuple[str, int]:
    """Kind and number of this host's devices."""
    fate.catch_aborts()
    return processes.connect(
        jax_address, settings.num_hosts, settings.host_index, settings.hosts_seconds
    )


def _tokens(settings: Settings) -> tuple[bytes, ...]:
    return tuple(TokenFile(settings.hosts_token_file)) if settings.hosts_token_file else ()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]
