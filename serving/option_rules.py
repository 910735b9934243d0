"""Rules of options that concern several of them."""

from typing import Any


def check_combinations(settings: Any) -> None:
    """Raises ValueError if two options contradict each other, or this platform cannot do what one asks for.

    Args:
      settings: `Settings`, which imports this module.
    """
    if settings.http_port not in (0, -1) and settings.http_port == settings.port:
        raise ValueError(f"http_port={settings.http_port} must differ from port")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ValueError("tls_cert and tls_key belong together: give both or neither")
    if settings.tls_client_ca and not settings.tls_cert:
        raise ValueError("tls_client_ca checks clients of TLS: give tls_cert and tls_key too")
    if settings.compile_only and settings.no_cache:
        raise ValueError("compile_only puts programs on disk, and no_cache forbids that")
    if settings.drafter and settings.method == "none":
        raise ValueError("method none takes no drafter: leave one of the two out")
