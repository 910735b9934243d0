"""Checks the Host header of requests.

The owner of a web page can let its name resolve to 127.0.0.1, so that the page reads answers of a server there
(DNS rebinding). The browser still sends the page's name as Host, so a server without tokens refuses it.
"""

import ipaddress
from collections.abc import Collection


def name_of(host: bytes) -> str:
    """The name in a Host header, without port, brackets and trailing dot."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def is_allowed(host: bytes, allowed: Collection[str]) -> bool:
    """Whether the Host header names this machine itself, or one of `allowed` ("*" allows all)."""
    name = name_of(host)
    if "*" in allowed or name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in {one.lower() for one in allowed}
    spelled = {one.lower().strip("[]") for one in allowed}
    return address.is_loopback or str(address) in spelled or name in spelled
