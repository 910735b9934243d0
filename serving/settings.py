"""Options of `peagle-serve`: types, defaults and rules. `sources` reads their values."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from peagle_jax.cli.model_folders import (
    check_folders,
    embedded,
    local_models,
)
from peagle_jax.cli.options import ModelOptions
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.options import NOT_EMPTY, Rule, at_least, option, options_of, read, within
from serving.limits import SECONDS, Limits
from serving.networks import is_loopback

if TYPE_CHECKING:
    from peagle_jax.text.tokenizer import Tokenizer

MOST_CONNECTIONS = 2048
"""Upper bound of the default connection limit of each port."""
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+|null")


def num_bytes(text: str) -> int | None:
    """Bytes of a size such as "8GiB", "500MB" or "1073741824"; None if it is none."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def _origins(text: str) -> list[str]:
    return [one.strip().lower() for one in text.split(",")]


_SIZE = Rule("a size, as 8GiB or 500MB", lambda text: num_bytes(text) is not None)
_ORIGINS = Rule(
    "an origin, such as https://chat.example:8443, or *; several have commas between them",
    lambda text: all(map(_ORIGIN.fullmatch, _origins(text))),
)
_PORT = Rule("a port or 0", lambda port: 0 <= port < 65536)
_PORT_OR_NONE = Rule("a port, 0 or -1", lambda port: -1 <= port < 65536)
_MORE_SECONDS = Rule("above 0", lambda seconds: 0 < seconds < float("inf"))

GPU_SLOTS = 64
"""Requests decoding at once on a GPU, where reading the weights takes most of a round."""


@dataclass(frozen=True, kw_only=True)
class Settings(Limits, ModelOptions):
    """Every option of the server. The field `some_name` is `--some-name` on the command line,
    `PEAGLE_SOME_NAME` in the environment and `some-name` (or `some_name`) in the file.

    Raises:
      ConfigError: a value breaks the rule of its option, or two options contradict each other.
    """

    served_model_name: str | None = option(
        None,
        "model name in requests and metrics (default: the folder's name, or the hub id)",
        NOT_EMPTY,
        metavar="NAME",
    )
    max_num_seqs: int | None = option(
        None,
        "most requests decoding at once (default: "
        f"{EngineConfig.max_num_seqs}, on GPUs {GPU_SLOTS})",
        at_least(1),
        metavar="N",
    )
    max_waiting: int = option(
        1024, "places of the queue, beside free slots; more requests are refused", metavar="N"
    )
    kv_cache_memory: str | None = option(
        None,
        "memory of the KV cache, as 8GiB or 500MB (default: what is left; without prefix-caching, "
        "and four times that on a CPU, at most enough for all slots)",
        _SIZE,
        metavar="SIZE",
    )
    prefill_chunk: int | None = option(
        None, "prompt tokens per prefill row and call (default: 128, on GPUs 512)", metavar="N"
    )
    prefill_rows: int | None = option(
        None, "prompts prefilled together (default: 1, on GPUs 4)", metavar="N"
    )
    small_prefills: bool | None = option(
        None, "smaller prefill programs besides, for calls with few tokens (default: on GPUs)"
    )
    reply_format: Literal[
        "auto", "gemma4", "harmony", "llama3", "qwen3", "qwen3-coder", "think", "none"
    ] = option(
        "auto",
        "how replies of a chat mark reasoning and tool calls; auto: as the model's own files say, "
        "qwen3 for the embedded model",
    )
    host: str = option("127.0.0.1", "address to listen on", NOT_EMPTY, metavar="ADDRESS")
    port: int = option(50051, "port of gRPC; 0 picks a free one", _PORT, metavar="N")
    http_port: int = option(
        8000,
        "port of HTTP: metrics and OpenAI's routes; 0 picks a free one, -1 turns HTTP off",
        _PORT_OR_NONE,
        metavar="N",
    )
    page: bool = option(True, "a page for people at / of the HTTP port")
    tls_cert: str | None = option(None, "certificate chain, PEM", NOT_EMPTY, metavar="FILE")
    tls_key: str | None = option(
        None, "private key of the certificate, PEM", NOT_EMPTY, metavar="FILE"
    )
    tls_client_ca: str | None = option(
        None,
        "authorities (CA) of client certificates, PEM; clients must then present one",
        NOT_EMPTY,
        metavar="FILE",
    )
    auth_token_file: str | None = option(
        None, "bearer tokens, one per line; clients must then send one", NOT_EMPTY, metavar="FILE"
    )
    allowed_hosts: str | None = option(
        None,
        "accepted names in the Host header of HTTP requests, separated by commas; * accepts all "
        "(default: on loopback without tokens the names of this machine, else all)",
        NOT_EMPTY,
        metavar="NAMES",
    )
    allowed_origins: str | None = option(
        None,
        "origins whose pages may use the HTTP port from a browser (CORS), separated by commas, "
        "such as "
        "https://chat.example; * allows all (default: none but the server's own page)",
        _ORIGINS,
        metavar="ORIGINS",
    )
    max_connections: int | None = option(
        None,
        "most connections per port (default: as many as file descriptors allow, at most "
        f"{MOST_CONNECTIONS})",
        at_least(1),
        metavar="N",
    )
    max_connections_per_address: int | None = option(
        None,
        "most HTTP connections from one address (default: half of all)",
        at_least(1),
        metavar="N",
    )
    header_seconds: float = option(
        10.0,
        "time limit of a TLS handshake and of the head of a request",
        _MORE_SECONDS,
        metavar="S",
    )
    idle_seconds: float = option(
        300.0, "time limit of a connection without requests; 0 sets none", SECONDS, metavar="S"
    )
    max_message_mib: int = option(8, "largest accepted message, MiB", within(1, 1024), metavar="N")
    drain_seconds: float = option(
        60.0, "time limit of open requests after SIGTERM", SECONDS, metavar="S"
    )
    reflection: bool | None = option(None, "gRPC reflection (default: on loopback only)")
    max_connection_seconds: float = option(
        0.0,
        "age at which a gRPC client is asked to reconnect, which spreads clients over new servers; "
        "open calls go on; 0 never asks",
        SECONDS,
        metavar="S",
    )
    round_seconds: float = option(
        300.0,
        "time limit of a decoding round, after which the engine counts as dead; 0 sets none",
        SECONDS,
        metavar="S",
    )
    stats_seconds: float = option(
        10.0, "time between two log lines of statistics; 0 writes none", SECONDS, metavar="S"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "lowest severity of log lines"
    )
    no_cache: bool = option(False, "keep no compiled programs on disk")
    ready: Literal["all", "first", None] = option(
        None,
        "all: serve once all programs are loaded, so that none compiles beside requests; first: "
        "serve with the "
        "program of the largest batch, while the others compile (default: all on GPUs, else first)",
    )
    compile_only: bool = option(
        False, "put all compiled programs on disk and end, for images and init containers"
    )
    programs_folder: Path | None = None
    """Of `EngineConfig`; no option: the process of the engine knows it."""

    def __post_init__(self):
        for name, one in options_of(Settings).items():
            object.__setattr__(self, name, read(one, getattr(self, name)))
        rule = None
        if self.http_port not in (0, -1) and self.http_port == self.port:
            rule = f"http_port={self.http_port} must differ from port"
        elif (self.tls_cert is None) != (self.tls_key is None):
            rule = "tls_cert and tls_key belong together: give both or neither"
        elif self.tls_client_ca and not self.tls_cert:
            rule = "tls_client_ca checks clients of TLS: give tls_cert and tls_key too"
        elif self.compile_only and self.no_cache:
            rule = "compile_only puts programs on disk, and no_cache forbids that"
        elif self.drafter and self.method == "none":
            rule = "method none takes no drafter: leave one of the two out"
        if rule is not None:
            raise ConfigError(rule)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def hosts(self) -> list[str] | None:
        """Accepted names in the Host header beside the names of this machine; None accepts every
        name.
        """
        if self.allowed_hosts is not None:
            return [self.host, *(name.strip() for name in self.allowed_hosts.split(","))]
        return [self.host] if self.is_loopback and not self.auth_token_file else None

    @property
    def origins(self) -> list[str]:
        """Origins whose pages may use the HTTP port."""
        return [] if self.allowed_origins is None else _origins(self.allowed_origins)

    @property
    def offers_reflection(self) -> bool:
        """Whether clients may list gRPC services and messages."""
        return self.is_loopback if self.reflection is None else self.reflection

    @property
    def warnings(self) -> list[str]:
        """Warnings about clients that may connect without TLS or without authentication."""
        if self.is_loopback:
            return []
        if self.auth_token_file and not self.tls_cert:
            return [f"bearer tokens reach {self.host} unencrypted; give tls-cert and tls-key"]
        if not self.auth_token_file and not self.tls_client_ca:
            return [
                f"anyone who reaches {self.host} may use the model: see docs/serving.md, Secure"
            ]
        return []

    def lines(self, sources: Mapping[str, str]) -> list[str]:
        """One line for each option: name, value and source.

        Args:
          sources: the source of each option's value, by the option's name.
        """
        values = {name: getattr(self, name) for name in options_of(Settings)}
        return [
            f"{name.replace('_', '-')}: {'not set' if value is None else value}  ({sources[name]})"
            for name, value in values.items()
        ]


def engine_config(settings: Settings, dtype: str = "float32") -> EngineConfig:
    """Sizes of the engine; pages for `kv_cache_memory` are left to `engines.make_engine`.

    Raises:
      ConfigError: sizes that no engine can have.
    """
    # None is the default of `EngineConfig`.
    given = {one.name: getattr(settings, one.name, None) for one in fields(EngineConfig)}
    same = {name: value for name, value in given.items() if value is not None}
    differing = dict(
        num_draft=settings.num_speculative_tokens, adaptive=settings.adaptive or "load", dtype=dtype
    )
    return EngineConfig(**same | differing)


def read_models(settings: Settings) -> Settings:
    """Downloads hub ids and checks config.json, without jax. Returns the settings with the models'
    folders.

    The model's name for clients is still the given folder's, or the hub id.

    Raises:
      ConfigError: folders that cannot be used, or sizes that the model does not have.
    """
    model, drafter = local_models(settings.model, settings.drafter, settings.method)
    drafters = [] if drafter is None else [drafter]
    check_folders(model, drafters, engine_config(settings), lora=settings.lora)
    changed: dict[str, str | None] = {"served_model_name": served_name(settings)}
    changed |= {"model": model and str(model), "drafter": drafter and str(drafter)}
    return replace(settings, **changed)


def served_name(settings: Settings) -> str:
    """The model's name for clients."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.model is None:
        return "embedded"
    from peagle_jax.checkpoint.hub import is_hub_id  # imports numpy, which --help does not need

    return settings.model if is_hub_id(settings.model) else Path(settings.model).resolve().name


def reply_format_of(settings: Settings, tokenizer: "Tokenizer | None") -> str:
    """The option, or for the embedded model, whose template has no signs of a format, one that can
    force calls.
    """
    is_embedded = tokenizer is not None and tokenizer.folder == embedded("target")
    return "qwen3" if settings.reply_format == "auto" and is_embedded else settings.reply_format
