"""Connects the processes of several hosts: host 0 leads, the others follow."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from peagle_jax import ConfigError, Engine
from peagle_jax.parallel import processes
from serving.bearer_tokens import TokenFile, own_token
from serving.hosts import FAILED, REFUSED, Fate, identity
from serving.option_types import address
from serving.rpc.credentials import channel_credentials, server_credentials
from serving.rpc.follower import LeaderStream
from serving.rpc.handshake import wait_for_leader
from serving.rpc.leader import Leader
from serving.settings import Settings
from serving.tls import Certificates, client_pems

_log = logging.getLogger(__name__)


def lead(settings: Settings, say: Callable[[str], None]) -> Leader:
    """The leader, once all hosts are connected. Their engines are still to be made.

    Raises:
      ConfigError: options that contradict each other, or a host is missing or has other devices.
      OSError: an address that cannot be used.
    """
    host, port = address(settings.coordinator)
    fate, certificates = Fate(0), None
    if settings.hosts_tls_cert:
        files = (settings.hosts_tls_cert, settings.hosts_tls_key, settings.hosts_tls_ca)
        certificates = Certificates(*files)
    leader = Leader(
        settings.num_hosts,
        identity(settings),
        tokens=_tokens(settings),
        seconds=settings.hosts_seconds,
        fate=fate,
        credentials=None if certificates is None else server_credentials(certificates),
    )
    listening_port = leader.start(host, port)
    say(f"hosts connect to {host}:{listening_port}")
    with failures_end_all(leader):
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
def failures_end_all(connected: Leader | LeaderStream) -> Iterator[None]:
    """Ends the processes of all hosts where the block raises: an interpreter that exits waits for the others.

    If another process is lost, that is the reason: what this one does with it fails too.
    """
    try:
        yield
    except (ConfigError, OSError) as error:
        connected.wait_for_blame()
        connected.end(REFUSED, " ".join(str(error).split()))
    except Exception as error:
        connected.wait_for_blame()
        _log.exception("this host failed")
        connected.end(FAILED, " ".join(str(error).split()))


def follow(settings: Settings, make_engine: Callable[[Settings], Engine]) -> None:
    """Repeats the leader's calls until the process ends; it does not return.

    Raises:
      ConfigError: the leader refuses this host, or weights or sizes cannot be used.
      OSError: a file that cannot be read.
    """
    fate, tokens, pems = Fate(settings.host_index), _tokens(settings), None
    if settings.hosts_tls_ca:
        files = (settings.hosts_tls_ca, settings.hosts_tls_cert, settings.hosts_tls_key)
        pems = client_pems(*files)
    until = time.monotonic() + settings.hosts_start_seconds
    context = None if pems is None else pems.context
    wait_for_leader(settings.coordinator, context, settings.hosts_start_seconds)
    stream = LeaderStream(
        settings.host_index,
        settings.coordinator,
        identity(settings),
        token=tokens[0] if tokens else None,
        seconds=settings.hosts_seconds,
        fate=fate,
        credentials=None if pems is None else channel_credentials(pems),
    )
    jax_address = stream.join(max(0.0, until - time.monotonic()))
    with failures_end_all(stream):
        stream.report_devices(*_connect(settings, jax_address, fate))
        stream.follow(make_engine(settings).follower())


def _connect(settings: Settings, jax_address: str, fate: Fate) -> tuple[str, int]:
    """Kind and number of this host's devices."""
    fate.catch_aborts()
    return processes.connect(
        jax_address, settings.num_hosts, settings.host_index, settings.hosts_seconds
    )


def _tokens(settings: Settings) -> tuple[bytes, ...]:
    if settings.hosts_token_file:
        return tuple(TokenFile(settings.hosts_token_file))
    if settings.hosts_tls_cert and settings.hosts_tls_ca:
        return ()  # certificates of both sides
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle-jax"
    return own_token(folder / "hosts-token")


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]
