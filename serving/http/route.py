"""Interface of the routes that take a JSON object; `Generation` runs them."""

import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serving import caller
from serving.frontend import Frontend
from serving.http.errors import Dialect
from serving.http.fields import Fields, Reading
from serving.http.options import check_model
from serving.stream import Ask, Delta, Stream

_log = logging.getLogger(__name__)
_MOST_CLIENTS = 256
_MOST_NAMES = 64  # of a client


class IgnoredFields:
    """Names ignored fields in the log.

    A client is a bearer token; without tokens it is an address. Clients that sent none for longest
    are forgotten first.

    Args:
      method: the path that clients call.
    """

    def __init__(self, method: str):
        self._method = method
        self._named: OrderedDict[str, set[str]] = OrderedDict()
        self._lock = threading.Lock()  # large bodies are read in threads

    def log(self, request_id: str, address: str, reading: Reading, root: type[Fields]) -> None:
        """Names the fields that were ignored in a request, unless the log has named them for this
        client.

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


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Identity of a request: its id, the client's address, and the headers of the client's trace
    (W3C).
    """

    request_id: str
    address: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)


class Answer(Protocol):
    """Forms the answer to one request. It keeps state, so each request has its own.

    Attributes:
      n: sequences per prompt.
      is_stream: whether the answer is a stream of server-sent events.
    """

    n: int
    is_stream: bool

    def part(self, index: int, delta: Delta, streams: Sequence[Stream]) -> list[dict | bytes]:
        """Events about the next output of sequence `index`; bytes are the JSON of one."""

    def end(self, streams: Sequence[Stream]) -> list[dict]:
        """Events at the end of the stream."""

    def whole(self, deltas: Mapping[int, Delta], streams: Sequence[Stream]) -> dict:
        """The content of an answer that is no stream; a delta has all output of its sequence."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request that was understood: one ask for each prompt."""

    asks: Sequence[Ask]
    answer: Answer


Encode = Callable[[], Awaitable[Call | dict]]
"""Tokenises the prompts of a request that was read. A dict is the content of an answer that needs
no generation.
"""


class Route[F: Fields](ABC):
    """A route that takes a JSON object.

    Attributes:
      path: as in the URL.
      dialect: the API it belongs to.
      fields: the fields of its requests.
      is_for_admins: whether bodies of callers without the admin scope are refused unread.
    """

    path: str
    dialect: Dialect
    fields: type[F]
    is_for_admins = False

    def __init__(self, frontend: Frontend):
        self._frontend, self._ignored = frontend, IgnoredFields(self.path)

    def read(self, content: dict[str, object], caller: Caller) -> Encode:
        """Validates a request and leaves its prompts untokenised; may run in any thread.

        The result must not hold `content`, which may be large.

        Raises:
          ServiceError: the request is malformed, or names a model or feature that the server lacks.
        """
        check_model(content, self._frontend.name)
        reading = Reading(self._frontend.limits)
        fields = self.fields.read(content, reading)
        if reading.num_ignored:
            self._ignored.log(caller.request_id, caller.address, reading, self.fields)
        return self._prepare(fields, caller)

    @abstractmethod
    def _prepare(self, fields: F, caller: Caller) -> Encode:
        """`read` of a request whose fields have the right types."""


def one_ask_each(ask: Ask, prompts: Sequence[list[int]]) -> list[Ask]:
    """`ask` for every prompt; of several each gets an id of its own, "ID-0" and so on."""
    if len(prompts) == 1:
        return [replace(ask, prompt=prompts[0])]
    return [
        replace(ask, prompt=prompt, request_id=f"{ask.request_id}-{place}")
        for place, prompt in enumerate(prompts)
    ]
