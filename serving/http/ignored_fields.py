"""Log lines about fields of requests that were ignored: each field once a client, and bounded."""

import logging
import threading
from collections import OrderedDict

from serving import caller
from serving.http.fields import Fields, Reading

_log = logging.getLogger(__name__)
_MOST_CLIENTS = 256
_MOST_NAMES = 64  # of a client


class IgnoredFields:
    """Names ignored fields in the log.

    A client is a bearer token; without tokens it is an address. Clients that sent none for longest are forgotten first.

    Args:
      method: the path that clients call.
    """

    def __init__(self, method: str):
        self._method = method
        self._named: OrderedDict[str, set[str]] = OrderedDict()
        self._lock = threading.Lock()  # large bodies are read in threads

    def log(self, request_id: str, address: str, reading: Reading, root: type[Fields]) -> None:
        """Names the fields that were ignored in a request, unless the log has named them for this client.

        Args:
          root: what the request was read as.
        """
        client = caller.current() or address
        with self._lock:
            named = self._named.setdefault(client, set())
            self._named.move_to_end(client)
            if len(self._named) > _MOST_CLIENTS:
                self._named.popitem(last=False)
            fresh = [one for one in reading.names(root) if one not in named]
            fresh = fresh[: _MOST_NAMES - len(named)]
            named.update(fresh)
        if fresh:
            fields = dict(
                request_id=request_id,
                protocol="http",
                method=self._method,
                ignored=fresh,
                num_ignored=reading.num_ignored,
            )
            _log.info("fields without effect", extra={"fields": fields})
