"""What `peagle-serve` can be told, and by whom: command line > environment > file > default."""

import argparse
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from peagle_jax.config import ConfigError

PREFIX = "PEAGLE_"
_OTHERS = {"PEAGLE_SHA"}  # variables of other commands
_SECTIONS = {
    "model": "what is served",
    "max_num_seqs": "sizes of the engine; everything is compiled for them at the start",
    "host": "where it listens",
    "tls_cert": "who may call",
    "max_request_seconds": "what a request may ask for",
    "drain_seconds": "running it",
}
"""Sections of --help, by the option that begins each."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_[0-9]+_(TCP|UDP).*)?$")


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
    max_logprobs: int = _option(5, "most alternatives per token for logprobs", metavar="N")
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
    max_request_seconds: float = _option(
        0.0, "longest a request may take, queue included; 0 sets no limit", metavar="S"
    )
    max_message_mib: int = _option(16, "largest message to accept, MiB", metavar="N")
    max_n: int = _option(16, "most sequences of one request", metavar="N")
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
            (self.max_n >= 1, "max_n", "at least 1"),
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


_NAMES = {one.name for one in fields(Settings)}
_SECONDS = [one.name for one in fields(Settings) if one.name.endswith("_seconds")]


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


_EPILOG = f"""\
Every option may also stand in the environment, as {PREFIX}MAX_NUM_SEQS=32, and in the YAML file of
--config, as `max-num-seqs: 32`. The command line wins over the environment, the environment over the
file. What is in force, and who said so, is printed at the start. Unknown options are refused in all three.

  peagle-serve                                          the small code model of the package
  peagle-serve --model DIR --drafter DIR --max-num-seqs 32 --max-model-len 8192
  peagle-serve --config server.yaml --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem

Ask it: peagle-client "def quicksort(xs):". The rest is in docs/serving.md."""


def parser() -> argparse.ArgumentParser:
    """The command line; options that are not given are absent from what it returns."""
    made = _Parser(
        prog="peagle-serve",
        description="Serves a model over gRPC, with metrics and OpenAI's routes over HTTP.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="YAML file of options")
    group = made
    for one in fields(Settings):
        if one.name in _SECTIONS:
            group = made.add_argument_group(_SECTIONS[one.name])
        flag = f"--{one.name.replace('_', '-')}"
        text = one.metadata["help"]
        if one.default is False:
            group.add_argument(flag, action="store_true", help=text)
            continue
        if one.default is not None:
            shown = f"{one.default:g}" if isinstance(one.default, float) else one.default
            text += f" (default: {shown})"
        kind = _kind(one.name)
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        group.add_argument(
            flag,
            type=kind,
            choices=one.metadata["choices"],
            metavar=one.metadata["metavar"],
            help=text,
        )
    return made


def resolve(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Settings, dict[str, str]]:
    """Settings from all sources, and where each came from.

    Raises:
      ConfigError: an unknown key, a value that is not one, or one that changes nothing because of
        another; the message says where it stands.
    """
    given = vars(parser().parse_args(arguments))
    from_environment = _from_environment(environment)
    file = given.pop("config", None) or from_environment.pop("config", None)
    from_environment.pop("config", None)
    layers = [
        (f"file {file}", _from_file(Path(file)) if file else {}),
        ("environment", from_environment),
        ("command line", given),
    ]
    values: dict[str, object] = {}
    sources = {one.name: "default" for one in fields(Settings)}
    for source, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, source)
    settings = Settings(**values)
    _refuse_idle(settings, sources)
    return settings, sources


def _refuse_idle(settings: Settings, sources: Mapping[str, str]) -> None:
    """What was given but changes nothing misleads: it is refused."""
    rules = (("num_speculative_tokens", settings.method == "none", "method none drafts nothing"),)
    for name, is_idle, why in rules:
        value = getattr(settings, name)
        if is_idle and value and sources[name] != "default":
            option = f"{name.replace('_', '-')}={value} ({sources[name]})"
            raise ConfigError(f"{option} has no effect: {why}; leave it out")


def _kind(name: str) -> type:
    """The type of an option's value, `None` aside."""
    hint = typing.get_type_hints(Settings)[name]
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    return hint


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHERS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _NAMES | {"config"} and _SERVICE_LINK.search(variable):
            raise ConfigError(
                f"variable {variable}: Kubernetes sets it for a Service of that name; set "
                "enableServiceLinks: false in the Pod's spec"
            )
        found[name] = text if name == "config" else _value(name, text, f"variable {variable}")
    return found


def _from_file(path: Path) -> dict[str, object]:
    import yaml

    try:
        tree = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({error})") from error
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold options, as `max-num-seqs: 32`")
    found: dict[str, object] = {}
    # Pairs, not a dict: of an option that stands there twice YAML would keep the last without a word.
    for key, node in tree.value:
        where = f"{path}, line {key.start_mark.line + 1}: {key.value}"
        name = str(key.value).replace("-", "_")
        if name in found:
            raise ConfigError(f"{where}: stands there twice; leave one out")
        try:
            value = yaml.SafeLoader("").construct_object(node, deep=True)
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: cannot be read as YAML ({error})") from error
        found[name] = _value(name, value, where)
    return found


def _value(name: str, value: object, where: str) -> object:
    """A value of the option's type, from a text or from YAML."""
    if name not in _NAMES:
        raise ConfigError(f"{where}: there is no option {name!r}; peagle-serve --help lists them")
    kind, default = _kind(name), Settings.__dataclass_fields__[name].default
    if value is None and default is None:
        return None
    if kind is bool:
        if isinstance(value, bool):
            return value
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ConfigError(f"{where}: {value!r} must be true or false")
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        made = kind(value)
        if kind is int and float(value) != made:
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {value!r} must be of type {kind.__name__}") from error
    choices = Settings.__dataclass_fields__[name].metadata["choices"]
    if choices and made not in choices:
        raise ConfigError(f"{where}: {value!r} must be one of {', '.join(choices)}")
    return made


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
