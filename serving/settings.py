"""Options of `peagle-serve`: types, defaults and rules. `sources` reads their values."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from peagle_jax.cli.model_folders import check_folders, check_head_is_given, local_folder
from peagle_jax.config import ConfigError, EngineConfig
from serving.option_rules import check_combinations
from serving.option_types import (
    Count,
    Int,
    Mebibytes,
    MoreSeconds,
    Origins,
    Port,
    PortOrNone,
    Seconds,
    Size,
    Text,
    Url,
    describe,
    is_loopback,
)

MOST_CONNECTIONS = 2048
"""Upper bound of the default connection limit of each port."""


def _option(default: object, text: str, *, metavar: str | None = None):
    """A field with its help text and the placeholder for its value in --help."""
    return Field(default, description=text, json_schema_extra={"metavar": metavar})


class Settings(BaseSettings):
    """Every option of the server. The field `some_name` is `--some-name` on the command line,
    `PEAGLE_SOME_NAME` in the environment and `some-name` (or `some_name`) in the file.

    Raises:
      ConfigError: a value breaks the rule of its option, or two options contradict each other.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    model: Text | None = _option(
        None,
        "Hugging Face folder, hub id (owner/name) or GGUF file of the target model (default: the embedded model)",
        metavar="DIR",
    )
    drafter: Text | None = _option(
        None,
        "folder or hub id of a draft head for --model, or module:Class of a drafter of your own",
        metavar="DIR",
    )
    served_model_name: Text | None = _option(
        None,
        "model name in requests and metrics (default: the folder's name, or the hub id)",
        metavar="NAME",
    )
    # None stands within Literal: typing caches unions of Literals regardless of their order.
    method: Literal["peagle", "eagle3", "none", None] = _option(
        None, "drafting method; none decodes without drafts (default: the head's own)"
    )
    num_speculative_tokens: Int = _option(
        7, "most drafted tokens per round (K in the papers)", metavar="K"
    )
    adaptive: Literal["off", "load", None] = _option(
        None,
        "load: the server chooses the drafts per round by load and acceptance, at most "
        "num-speculative-tokens; off: they are fixed (default: load)",
    )
    selector: bool = _option(True, "let the head's selector, if any, choose drafts (default: on)")
    draft_sampling: Literal["argmax", "sample"] = _option(
        "argmax", "above temperature 0: draft the head's likeliest tokens, or draw them"
    )
    verify_method: Literal["token", "block"] = _option("token", "how sampled drafts are accepted")
    tensor_parallel: Count = _option(1, "devices that run every round together", metavar="N")
    gather: Literal["auto", "library", "peers"] = _option(
        "auto",
        "how they exchange small arrays: by kernels that store into the memory of their peers, or by the library's "
        "collectives; auto: peers on Hopper GPUs linked by NVLink",
    )
    max_num_seqs: Int = _option(8, "most requests decoding at once", metavar="N")
    max_model_len: Int = _option(2048, "most tokens of prompt and output together", metavar="N")
    max_waiting: Int = _option(
        1024, "places of the queue, beside free slots; more requests are refused", metavar="N"
    )
    kv_cache_memory: Size | None = _option(
        None,
        "memory of the KV cache, as 8GiB or 500MB (default: what is left; without prefix-caching, "
        "and four times that on a CPU, at most enough for all slots)",
        metavar="SIZE",
    )
    prefix_caching: bool = _option(
        True, "prefill a prompt only from where it differs from earlier texts (default: on)"
    )
    saved_rings: Int | None = _option(
        None, "beginnings whose sliding windows are kept (default: 64, in 256 MiB)", metavar="N"
    )
    prompt_logprobs: bool = _option(
        False, "compile what prompt_logprobs of requests, and echo with logprobs, need"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _option("auto", "dtype of keys and values")
    activations: Literal["bf16", "fp8"] = _option(
        "bf16", "how products with fp8 weights read activations; fp8 quantises them"
    )
    prefill_chunk: Int | None = _option(
        None, "prompt tokens per prefill row and call (default: 128, on GPUs 512)", metavar="N"
    )
    prefill_rows: Int | None = _option(
        None, "prompts prefilled together (default: 1, on GPUs 4)", metavar="N"
    )
    small_prefills: bool | None = _option(
        None, "smaller prefill programs besides, for calls with few tokens (default: on GPUs)"
    )
    prefill_calls: Int | None = _option(
        None,
        "most prefill calls between two rounds (default: 1; 4 if nothing decodes)",
        metavar="N",
    )
    max_logprobs: Int = _option(20, "most alternatives per token for logprobs", metavar="N")
    dtype: Literal["auto", "float32", "bfloat16"] = _option(
        "auto", "dtype of weights and arithmetic"
    )
    quantization: Literal["fp8"] | None = _option(
        None, "quantise the target's matrices while they are loaded"
    )
    reply_format: Literal[
        "auto", "gemma4", "harmony", "llama3", "qwen3", "qwen3-coder", "think", "none"
    ] = _option(
        "auto",
        "how replies of a chat mark reasoning and tool calls (default: as the model's own files say; qwen3 for the "
        "embedded model)",
    )
    host: Text = _option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: Port = _option(50051, "port of gRPC; 0 picks a free one", metavar="N")
    http_port: PortOrNone = _option(
        8000,
        "port of HTTP: metrics and OpenAI's routes; 0 picks a free one, -1 turns HTTP off",
        metavar="N",
    )
    page: bool = _option(True, "a page for people at / of the HTTP port")
    tls_cert: Text | None = _option(None, "certificate chain, PEM", metavar="FILE")
    tls_key: Text | None = _option(None, "private key of the certificate, PEM", metavar="FILE")
    tls_client_ca: Text | None = _option(
        None,
        "authorities (CA) of client certificates, PEM; clients must then present one",
        metavar="FILE",
    )
    auth_token_file: Text | None = _option(
        None, "bearer tokens, one per line; clients must then send one", metavar="FILE"
    )
    allowed_hosts: Text | None = _option(
        None,
        "accepted names in the Host header of HTTP requests, separated by commas; * accepts all "
        "(default: on loopback without tokens the names of this machine, else all)",
        metavar="NAMES",
    )
    allowed_origins: Origins | None = _option(
        None,
        "origins whose pages may use the HTTP port from a browser (CORS), separated by commas, such as "
        "https://chat.example; * allows all (default: none but the server's own page)",
        metavar="ORIGINS",
    )
    max_connections: Count | None = _option(
        None,
        "most connections per port (default: as many as file descriptors allow, at most "
        f"{MOST_CONNECTIONS})",
        metavar="N",
    )
    max_connections_per_address: Count | None = _option(
        None, "most HTTP connections from one address (default: half of all)", metavar="N"
    )
    header_seconds: MoreSeconds = _option(
        10.0, "time limit of a TLS handshake and of the head of a request", metavar="S"
    )
    idle_seconds: Seconds = _option(
        300.0, "time limit of a connection without requests; 0 sets none", metavar="S"
    )
    max_request_seconds: Seconds = _option(
        0.0, "time limit of a request, queue included; 0 sets none", metavar="S"
    )
    max_message_mib: Mebibytes = _option(8, "largest accepted message, MiB", metavar="N")
    max_n: Count = _option(16, "most sequences of one request", metavar="N")
    min_priority: Int = _option(
        -100,
        "lowest priority of a request; with 0 no client can pass those that ask for none",
        metavar="N",
    )
    max_prompt_chars: Count = _option(
        1_000_000,
        "most characters of a prompt or chat; fewer if max-model-len tokens cannot hold them",
        metavar="N",
    )
    max_messages: Count = _option(
        2048, "most messages of a chat and most parts of a message", metavar="N"
    )
    max_tools: Count = _option(128, "most tools of a chat", metavar="N")
    max_stops: Count = _option(16, "most stop strings of a request", metavar="N")
    max_stop_chars: Count = _option(512, "most characters of a stop string", metavar="N")
    max_stop_ids: Count = _option(256, "most stop ids of a request", metavar="N")
    max_json_depth: Count = _option(
        32, "deepest nesting of lists and objects in a client's JSON", metavar="N"
    )
    unknown_fields: Literal["ignore", "refuse"] = _option(
        "ignore", "what becomes of fields in an HTTP request's JSON that the server does not know"
    )
    tokenizer_threads: Count = _option(2, "most long prompts tokenised at once", metavar="N")
    drain_seconds: Seconds = _option(60.0, "time limit of open requests after SIGTERM", metavar="S")
    reflection: bool | None = _option(None, "gRPC reflection (default: on loopback only)")
    max_connection_seconds: Seconds = _option(
        0.0,
        "age at which a gRPC client is asked to reconnect, which spreads clients over new servers; "
        "open calls go on; 0 never asks",
        metavar="S",
    )
    round_seconds: Seconds = _option(
        300.0,
        "time limit of a decoding round, after which the engine counts as dead; 0 sets none",
        metavar="S",
    )
    stats_seconds: Seconds = _option(
        10.0, "time between two log lines of statistics; 0 writes none", metavar="S"
    )
    otlp_endpoint: Url | None = _option(
        None, "collector of OpenTelemetry spans, such as http://host:4317", metavar="URL"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "lowest severity of log lines"
    )
    no_cache: bool = _option(False, "keep no compiled programs on disk")
    ready: Literal["all", "first", None] = _option(
        None,
        "all: serve once all programs are loaded, so that none compiles beside requests; first: serve with the "
        "program of the largest batch, while the others compile (default: all on GPUs, else first)",
    )
    compile_only: bool = _option(
        False, "put all compiled programs on disk and end, for images and init containers"
    )

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error)) from error

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **others
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`Settings(...)` has its arguments and defaults only; `sources.resolve` adds the other sources."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        check_combinations(self)
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def hosts(self) -> list[str] | None:
        """Accepted names in the Host header beside the names of this machine; None accepts every name."""
        if self.allowed_hosts is not None:
            return [self.host, *(name.strip() for name in self.allowed_hosts.split(","))]
        return [self.host] if self.is_loopback and not self.auth_token_file else None

    @property
    def origins(self) -> list[str]:
        """Origins whose pages may use the HTTP port."""
        return [] if self.allowed_origins is None else self.allowed_origins.split(",")

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
        return [
            f"{name.replace('_', '-')}: {getattr(self, name)}  ({sources[name]})"
            for name in type(self).model_fields
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
        num_draft=settings.num_speculative_tokens,
        adaptive=settings.adaptive or "load",
        dtype=dtype,
    )
    return EngineConfig(**same | differing)


def read_models(settings: Settings) -> Settings:
    """Downloads hub ids and checks config.json, without jax. Returns the settings with the models' folders.

    The model's name for clients is still the given folder's, or the hub id.

    Raises:
      ConfigError: folders that cannot be used, or sizes that the model does not have.
    """
    check_head_is_given(settings.model, settings.drafter, settings.method)
    model, drafter = local_folder(settings.model), local_folder(settings.drafter)
    check_folders(model, [] if drafter is None else [drafter], engine_config(settings))
    changed: dict[str, str | None] = {"served_model_name": served_name(settings)}
    changed |= {"model": model and str(model), "drafter": drafter and str(drafter)}
    return settings.model_copy(update=changed)


def served_name(settings: Settings) -> str:
    """The model's name for clients."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.model is None:
        return "embedded"
    from peagle_jax.checkpoint.hub import is_hub_id  # imports numpy, which --help does not need

    return settings.model if is_hub_id(settings.model) else Path(settings.model).resolve().name
