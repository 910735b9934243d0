"""Where the options of `peagle-serve` come from: command line > environment > file > default."""

import argparse
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from peagle_jax.config import ConfigError
from serving.settings import Settings

PREFIX = "PEAGLE_"
_OTHERS = {"PEAGLE_SHA"}  # variables of other commands
_SECTIONS = {
    "model": "what is served",
    "max_num_seqs": "sizes of the engine; everything is compiled for them at the start",
    "host": "where it listens",
    "tls_cert": "who may call",
    "max_connections": "connections",
    "max_request_seconds": "what a request may ask for",
    "drain_seconds": "running it",
}
"""Sections of --help, by the option that begins each."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_[0-9]+_(TCP|UDP).*)?$")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?(e[-+]?[0-9]+)?", re.IGNORECASE)
_NAMES = {one.name for one in fields(Settings)}


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


_EPILOG = f"""\
Every option may also stand in the environment, as {PREFIX}MAX_NUM_SEQS=32, and in the YAML file of
--config, as `max-num-seqs: 32`. The command line wins over the environment, the environment over the
file. The effective settings and their sources are printed at the start. Unknown options are refused in all three.

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
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({_reason(error)})") from error
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
        found[name] = _value(name, _from_node(name, node, where), where)
    return found


def _from_node(name: str, node, where: str) -> object:
    """A value of the file. YAML 1.1 reads 010 as 8, 1:30 as 90 and 1_0 as 10: numbers are decimal here,
    and what an option takes as text is left as it is written."""
    import yaml

    kind = _kind(name) if name in _NAMES else None
    if isinstance(node, yaml.ScalarNode):
        if kind in (int, float) and re.match(r"[-+]?[0-9]", node.value):
            if not _DECIMAL.fullmatch(node.value):
                raise ConfigError(
                    f"{where}: {node.value} is not a plain decimal number; write it without leading "
                    "zeros, colons and underscores"
                )
            return node.value
        if kind is str and not node.tag.endswith(":null"):
            return node.value
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be read as YAML ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """What is wrong, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())


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
