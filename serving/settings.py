"""What `peagle-serve` can be told, and by whom: command line > environment > file > default."""

import argparse
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
    max_waiting: int = _option(1024, "bound of the queue; beyond it requests are refused")
    kv_cache_memory: str | None = _option(
        None, "memory for KV pages, as 8GiB or 500MB (default: what all slots need)", metavar="SIZE"
    )
    prefill_chunk: int = _option(128, "prompt tokens per prefill row and call", metavar="N")
    prefill_rows: int = _option(1, "prompts prefilled together", metavar="N")
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
        0.0, "longest a request may take, queue included; 0 is no limit", metavar="S"
    )
    max_message_mib: int = _option(16, "largest message to accept, MiB", metavar="N")
    max_n: int = _option(16, "most sequences of one request", metavar="N")
    drain_seconds: float = _option(60.0, "how long SIGTERM lets open requests run on", metavar="S")
    reflection: bool | None = _option(None, "gRPC reflection (default: on loopback only)")
    stats_seconds: float = _option(10.0, "between two log lines of figures; 0 is never")
    log_level: str = _option(
        "info", "least severe log lines to write", choices=("debug", "info", "warning", "error")
    )
    no_cache: bool = _option(False, "do not keep compiled programs on disk")

    def __post_init__(self):
        checks = (
            (-1 <= self.http_port < 65536, "http_port", "a port, 0 or -1"),
            (0 <= self.port < 65536, "port", "a port or 0"),
            (self.max_message_mib >= 1, "max_message_mib", "at least 1"),
            (self.max_n >= 1, "max_n", "at least 1"),
            (self.drain_seconds >= 0, "drain_seconds", "0 or more"),
            (self.max_request_seconds >= 0, "max_request_seconds", "0 or more"),
            (self.stats_seconds >= 0, "stats_seconds", "0 or more"),
        )
        for ok, name, rule in checks:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {rule}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca checks clients of TLS: give tls_cert and tls_key too")
        if self.drafter and self.method == "none":
            raise ConfigError("method none takes no drafter")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")

    def lines(self, sources: Mapping[str, str]) -> list[str]:
        """One line an option: its value and who gave it."""
        return [
            f"{one.name.replace('_', '-')}: {getattr(self, one.name)}  ({sources[one.name]})"
            for one in fields(self)
        ]


def parser() -> argparse.ArgumentParser:
    """The command line; options that are not given are absent from what it returns."""
    made = argparse.ArgumentParser(
        prog="peagle-serve",
        description="Serves a model over gRPC, with metrics and OpenAI's routes over HTTP.",
        epilog="Every option may also stand in --config FILE (YAML, by its name without dashes in "
        f"front) or in the environment ({PREFIX}MAX_NUM_SEQS=32). The command line wins over the "
        "environment, the environment over the file. docs/serving.md tells the rest.",
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("--config", metavar="FILE", help="YAML file of options")
    for one in fields(Settings):
        flag = f"--{one.name.replace('_', '-')}"
        text = one.metadata["help"]
        if one.default not in (None, False):
            text += f" (default {one.default})"
        kind = _kind(one.name)
        if kind is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        metavar = one.metadata["metavar"] or (None if one.metadata["choices"] else "N")
        made.add_argument(
            flag, type=kind, choices=one.metadata["choices"], metavar=metavar, help=text
        )
    return made


def resolve(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Settings, dict[str, str]]:
    """Settings from all sources, and where each came from.

    Raises:
      ConfigError: an unknown key, or a value that is not one; the message says where it stands.
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
    return Settings(**values), sources


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
        found[name] = text if name == "config" else _value(name, text, f"variable {variable}")
    return found


def _from_file(path: Path) -> dict[str, object]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold options, as `max-num-seqs: 32`")
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        found[name] = _value(name, value, f"{path}: {key}")
    return found


def _value(name: str, value: object, where: str) -> object:
    """A value of the option's type, from a text or from YAML."""
    known = {one.name: one for one in fields(Settings)}
    if name not in known:
        raise ConfigError(f"{where}: there is no option {name!r}; peagle-serve --help lists them")
    kind = _kind(name)
    if value is None and known[name].default is None:
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
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} must be of type {kind.__name__}") from error
    choices = known[name].metadata["choices"]
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
