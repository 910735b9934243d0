"""Rules of the options about several hosts."""

from typing import Protocol

from serving.option_types import address, is_loopback


class HostsOptions(Protocol):
    """Those of `settings.Settings` that the rules are about."""

    tensor_parallel: int
    num_hosts: int
    host_index: int
    coordinator: str | None
    hosts_token_file: str | None
    hosts_tls_cert: str | None
    hosts_tls_key: str | None
    hosts_tls_ca: str | None


def check_hosts(options: HostsOptions) -> None:
    """Checks the options of one host by themselves.

    Raises:
      ValueError: they contradict each other, or one is missing.
    """
    has_tls = options.hosts_tls_cert or options.hosts_tls_key or options.hosts_tls_ca
    if options.num_hosts == 1:
        if options.host_index or options.coordinator or has_tls:
            raise ValueError("host_index, coordinator and hosts_tls need num_hosts, 2 or more")
        return
    if not 0 <= options.host_index < options.num_hosts:
        raise ValueError(f"host_index={options.host_index} must be 0 to {options.num_hosts - 1}")
    if options.tensor_parallel % options.num_hosts:
        raise ValueError(
            f"num_hosts={options.num_hosts} must divide tensor_parallel={options.tensor_parallel}"
        )
    if options.coordinator is None:
        raise ValueError("num_hosts needs coordinator, HOST:PORT of host 0")
    _check_tls(options)
    host, _ = address(options.coordinator)
    is_verified = options.hosts_tls_cert and options.hosts_tls_ca
    if not is_loopback(host) and not options.hosts_token_file and not is_verified:
        raise ValueError(
            f"a coordinator at {host} needs hosts_token_file, or hosts_tls_cert with hosts_tls_ca: "
            "it is not on loopback"
        )


def _check_tls(options: HostsOptions) -> None:
    if (options.hosts_tls_cert is None) != (options.hosts_tls_key is None):
        raise ValueError("hosts_tls_cert and hosts_tls_key belong together: give both or neither")
    if options.host_index == 0 and options.hosts_tls_ca and not options.hosts_tls_cert:
        raise ValueError(
            "hosts_tls_ca verifies hosts by TLS: give hosts_tls_cert and hosts_tls_key too"
        )
    if options.host_index and options.hosts_tls_cert and not options.hosts_tls_ca:
        raise ValueError("hosts_tls_cert needs hosts_tls_ca, which verifies host 0")


def is_unencrypted(options: HostsOptions) -> bool:
    """Whether tokens and token ids pass between hosts unencrypted, other than on loopback."""
    if options.num_hosts == 1 or is_loopback(address(options.coordinator)[0]):
        return False
    return not options.hosts_tls_cert and not options.hosts_tls_ca
