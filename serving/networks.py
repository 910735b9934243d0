"""Whose an address is."""

import ipaddress


def network(address: str) -> str:
    """What one customer owns: an IPv4 address, or the /64 of an IPv6 address. Other texts stay as
    they are.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
