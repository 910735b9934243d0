"""Every option of `peagle-serve`, its default and its rules; `sources` reads them."""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.model_folders import check_folders, check_head_is_given

MOST_CONNECTIONS = 2048
"""Connections of a port unless an option says otherwise."""


def _option(default, text: str, *, metavar: str | None = None, choices: Sequence | None = None):
    return field(default=default, metadata=dict(help=text, metavar=metavar, choices=choices))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every option of the server. A field `some_name` is `--some-name`, `PEAGLE_SOME_NAME` and the
    file's `some-name` (or `some_name`)."""

    model: str | None = _option(
        None, "Hugging Face folder of the target (default: the embedded model)", metavar="DIR"
    )
    drafter: str | None = _option(None, "folder of a head for --model", metavar="DIR")
    served_model_name: str | None = _option(
        None, "what clients call the model (default: its folder's name)", metavar="NAME"
    )
    method: str | None = _option(
        None,
        "how to draft; none decodes plainly (default: as the head says)",
        choices=("peagle", "eagle3", "none"),
    )
    num_speculative_tokens: int = _option(7, "most drafts per round (the papers' K)", metavar="K")
    max_num_seqs: int = _option(8, "most requests decoding at once", metavar="N")
    max_model_len: int = _option(2048, "most tokens of prompt and output together", metavar="N")
    max_waiting: int = _option(
        1024, "bound of the queue; beyond it requests are refused", metavar="N"
    )
    kv_cache_memory: str | None = _option(
        None, "memory for KV pages, as 8GiB or 500MB (default: what all slots need)", metavar="SIZE"
    )
    kv_cache_dtype: str = _option(
        "auto", "of keys and values: as dtype says, or fp8", choices=("auto", "fp8")
    )
    prefill_chunk: int = _option(128, "prompt tokens per prefill row and call", metavar="N")
    prefill_rows: int = _option(1, "prompts prefilled together", metavar="N")
    prefill_calls: int = _option(4, "most prefill calls between two rounds", metavar="N")
    max_logprobs: int = _option(20, "most alternatives per token for logprobs", metavar="N")
    dtype: str = _option(
        "auto", "of weights and arithmetic", choices=("auto", "float32", "bfloat16")
    )
    quantization: str | None = _option(
        None, "quantise the target's matrices on the way in", choices=("fp8",)
    )
    host: str = _option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = _option(50051, "of gRPC; 0 takes a free one", metavar="N")
    http_port: int = _option(
        8000, "of metrics and the OpenAI routes; 0 takes a free one, -1 none", metavar="N"
    )
    tls_cert: str | None = _option(None, "certificate chain, PEM", metavar="FILE")
    tls_key: str | None = _option(None, "its private key, PEM", metavar="FILE")
    tls_client_ca: str | None = _option(
        None, "authorities of client certificates, PEM; clients must then have one", metavar="FILE"
    )
    auth_token_file: str | None = _option(
        None, "bearer tokens, one a line; clients must then send one", metavar="FILE"
    )
    allowed_hosts: str | None = _option(
        None,
        "names, separated by commas, that HTTP requests may give as Host; * allows all (default: on "
        "loopback without tokens the names of this machine, else all)",
        metavar="NAMES",
    )
    max_connections: int | None = _option(
        None,
        "most connections of each port (default: as many as file descriptors allow, at most "
        f"{MOST_CONNECTIONS})",
        metavar="N",
    )
    max_connections_per_address: int | None = _option(
        None, "most HTTP connections from one address (default: half of all)", metavar="N"
    )
    header_seconds: float = _option(
        10.0, "time for a TLS handshake and for the head of a request", metavar="S"
    )
    idle_seconds: float = _option(
        300.0, "keep a connection without requests so long; 0 keeps it for ever", metavar="S"
    )
    max_request_seconds: float = _option(
        0.0, "longest a request may take, queue included; 0 sets no limit", metavar="S"
    )
    max_message_mib: int = _option(8, "largest message to accept, MiB", metavar="N")
    max_n: int = _option(16, "most sequences of one request", metavar="N")
    max_prompt_chars: int = _option(
        1_000_000,
        "most characters of a prompt or chat; fewer where max-model-len tokens cannot hold them",
        metavar="N",
    )
    max_messages: int = _option(
        2048, "most messages of a chat, and parts of a message", metavar="N"
    )
    max_stops: int = _option(16, "most stop strings of a request", metavar="N")
    max_stop_chars: int = _option(512, "most characters of a stop string", metavar="N")
    max_stop_ids: int = _option(256, "most stop ids of a request", metavar="N")
    max_json_depth: int = _option(
        32, "most lists and objects within each other, in JSON of clients", metavar="N"
    )
    tokenizer_threads: int = _option(2, "most long prompts that are tokenised at once", metavar="N")
    drain_seconds: float = _option(60.0, "how long SIGTERM lets open requests run on", metavar="S")
    reflection: bool | None = _option(None, "gRPC reflection (default: on loopback only)")
    max_connection_seconds: float = _option(
        0.0,
        "asks clients to connect anew after this long, which spreads them over new servers; open "
        "calls go on; 0 never asks",
        metavar="S",
    )
    round_seconds: float = _option(
        300.0, "a round that takes longer means a dead engine; 0 waits for ever", metavar="S"
    )
    stats_seconds: float = _option(
        10.0, "between two log lines of figures; 0 writes none", metavar="S"
    )
    otlp_endpoint: str | None = _option(
        None, "collector of OpenTelemetry spans, as http://host:4317", metavar="URL"
    )
    log_level: str = _option(
        "info", "least severe log lines to write", choices=("debug", "info", "warning", "error")
    )
    no_cache: bool = _option(False, "do not keep compiled programs on disk")

    def __post_init__(self):
        checks = (
            (-1 <= self.http_port < 65536, "http_port", "a port, 0 or -1"),
            (0 <= self.port < 65536, "port", "a port or 0"),
            (
                self.http_port in (0, -1) or self.http_port != self.port,
                "http_port",
                "not port's own",
            ),
            (1 <= self.max_message_mib <= 1024, "max_message_mib", "between 1 and 1024"),
            (
                self.otlp_endpoint is None
                or self.otlp_endpoint.startswith(("http://", "https://")),
                "otlp_endpoint",
                "a URL that begins with http:// or https://",
            ),
            (self.header_seconds > 0, "header_seconds", "above 0"),
            *(
                (getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
                for name in _COUNTS
            ),
            *(
                (0 <= getattr(self, name) < math.inf, name, "0 or more seconds")
                for name in _SECONDS
            ),
            *(
                (getattr(self, one.name) != "", one.name, "left out or given")
                for one in fields(self)
            ),
        )
        for ok, name, rule in checks:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {rule}")
        if self.kv_cache_memory is not None:
            num_bytes(self.kv_cache_memory)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca checks clients of TLS: give tls_cert and tls_key too")
        if self.drafter and self.method == "none":
            raise ConfigError("method none takes no drafter: leave one of the two out")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody on another machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> list[str] | None:
        """Names that the Host of an HTTP request may have beside those of this machine; None allows all."""
        if self.allowed_hosts is not None:
            return [self.host, *(name.strip() for name in self.allowed_hosts.split(","))]
        return [self.host] if self.is_loopback and not self.auth_token_file else None

    @property
    def offers_reflection(self) -> bool:
        """Whether clients may list services and messages."""
        return self.is_loopback if self.reflection is None else self.reflection

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about who may call."""
        if self.is_loopback:
            return []
        if self.auth_token_file and not self.tls_cert:
            return [f"bearer tokens reach {self.host} unencrypted; give tls-cert and tls-key"]
        if not self.auth_token_file and not self.tls_client_ca:
            return [f"whoever reaches {self.host} may use the model: see docs/serving.md, Secure"]
        return []

    def lines(self, sources: Mapping[str, str]) -> list[str]:
        """One line an option: its value and who gave it."""
        return [
            f"{one.name.replace('_', '-')}: {getattr(self, one.name)}  ({sources[one.name]})"
            for one in fields(self)
        ]


_COUNTS = (
    *("max_connections", "max_connections_per_address"),
    *("max_n", "max_prompt_chars", "max_messages", "max_stops", "max_stop_chars", "max_stop_ids"),
    *("max_json_depth", "tokenizer_threads"),
)
_SECONDS = [one.name for one in fields(Settings) if one.name.endswith("_seconds")]


def num_bytes(text: str) -> int:
    """Bytes of a size as "8GiB", "500MB" or "1073741824".

    Raises:
      ConfigError: it is no size.
    """
    units = {"": 1, "b": 1} | {
        f"{letter}{suffix}": base**power
        for power, letter in enumerate("kmgt", start=1)
        for suffix, base in (("b", 1000), ("ib", 1024))
    }
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units:
        raise ConfigError(f"{text!r} is not a size; write one as 8GiB or 500MB")
    return int(float(match[1]) * units[match[2]])


def engine_config(settings: Settings, dtype: str = "float32") -> EngineConfig:
    """Sizes of the engine; pages for `kv_cache_memory` are left to `app.make_engine`.

    Raises:
      ConfigError: sizes that no engine can have.
    """
    return EngineConfig(
        num_draft=settings.num_speculative_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        max_waiting=settings.max_waiting,
        prefill_chunk=settings.prefill_chunk,
        prefill_rows=settings.prefill_rows,
        prefill_calls=settings.prefill_calls,
        max_logprobs=settings.max_logprobs,
        dtype=dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )


def check_models(settings: Settings) -> None:
    """Looks at the folders' config.json; without jax.

    Raises:
      ConfigError: folders that cannot be used, or sizes that the model does not have.
    """
    check_head_is_given(settings.model, settings.drafter, settings.method)
    drafters = [] if settings.drafter is None else [settings.drafter]
    check_folders(settings.model, drafters, engine_config(settings))
