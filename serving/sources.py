"""Reads the options of `peagle-serve` from command line > environment > file > defaults."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax import removed
from peagle_jax.cli.command_line import Parser, add_options, add_removed
from peagle_jax.config import ConfigError
from peagle_jax.options import options_of, read
from serving.settings import Settings

PREFIX = "PEAGLE_"
_OTHER_VARIABLES = {"PEAGLE_SHA"}  # of other commands
_SECTIONS = {
    "max_num_seqs": "engine, all of whose programs are compiled at the start",
    "model": "what is served",
    "max_request_seconds": "limits of requests",
    "served_model_name": "queue, memory and replies",
    "host": "addresses and ports",
    "tls_cert": "TLS and authentication",
    "max_connections": "connections and messages",
    "drain_seconds": "operation",
}
"""Headings of --help, each with the option that it precedes."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_[0-9]+_(TCP|UDP).*)?$")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?(e[-+]?[0-9]+)?", re.IGNORECASE)
_OPTIONS = options_of(Settings)
_EPILOG = f"""\
Every option can also be set in the environment, as {PREFIX}MAX_NUM_SEQS=32, and in the YAML file of
--config, as `max-num-seqs: 32`. The command line wins over the environment, the environment over
the file. The effective settings and their sources are printed at the start. Unknown options are
refused in all three.

  peagle-serve                                          the small code model of the package
  peagle-serve --model DIR --drafter DIR --max-num-seqs 32 --max-model-len 8192
  peagle-serve --config server.yaml --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem

Send a request: peagle-client "def quicksort(xs):". docs/serving.md describes the rest."""


def parser() -> argparse.ArgumentParser:
    """The command line. Its result has no attribute for an option that is not given."""
    command_line = Parser(
        prog="peagle-serve",
        description="Serves a model over gRPC, with metrics and OpenAI's routes over HTTP.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command_line.add_argument("--config", metavar="FILE", help="YAML file of options")
    group = command_line
    for name in _OPTIONS:
        if name in _SECTIONS:
            group = command_line.add_argument_group(_SECTIONS[name])
        add_options(group.add_argument, Settings, name, has_defaults=False)
    add_removed(command_line, removed.OPTIONS)
    return command_line


def resolve(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Settings, dict[str, str]]:
    """The settings, and the source of each option's value by the option's name.

    Raises:
      ConfigError: an unknown option, an invalid value, or an option without effect because of
        another. The message names the place.
    """
    given = vars(parser().parse_args(arguments))
    variables = _from_environment(environment)
    file = given.pop("config", None) or variables.get("config")
    variables.pop("config", None)
    layers = {
        "command line": given,
        "environment": variables,
        f"file {file}": _from_file(Path(file)) if file else {},
    }
    merged: dict[str, object] = {}
    for layer in reversed(layers.values()):
        merged |= layer
    settings = Settings(**merged)
    source_of = lambda name: next((one for one in layers if name in layers[one]), "default")
    sources = {name: source_of(name) for name in _OPTIONS}
    _refuse_ineffective(settings, sources)
    return settings, sources


_OF_DRAFTS: dict[str, tuple[object, ...]] = {
    "num_speculative_tokens": (),
    "adaptive": ("off",),
    "draft_sampling": ("argmax",),
    "verify_method": ("block",),
}
"""Options of a head's drafts, with values that ask for nothing."""


def _refuse_ineffective(settings: Settings, sources: Mapping[str, str]) -> None:
    reasons = {}
    if settings.method == "none":
        reasons = dict.fromkeys(_OF_DRAFTS, "method none drafts nothing")
    if not settings.prefix_caching:
        reasons["saved_rings"] = "prefix-caching is off"
    for name, reason in reasons.items():
        value = getattr(settings, name)
        is_off = value in (0, None, *_OF_DRAFTS.get(name, ()))
        if not is_off and sources[name] != "default":
            option = f"{name.replace('_', '-')}={value} ({sources[name]})"
            raise ConfigError(f"{option} has no effect: {reason}; leave it out")


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name == "config":
            values[name] = text
            continue
        if name not in _OPTIONS and _SERVICE_LINK.search(variable):
            raise ConfigError(
                f"variable {variable}: Kubernetes sets it for a Service of that name; set "
                "enableServiceLinks: false in the Pod's spec"
            )
        values[name] = _value_at(f"variable {variable}", name, text)
    return values


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
    values: dict[str, object] = {}
    for key, node in tree.value:
        place = f"{path}, line {key.start_mark.line + 1}: {key.value}"
        name = str(key.value).replace("-", "_")
        if name in values:
            raise ConfigError(f"{place}: stands there twice; leave one out")
        values[name] = _value_at(place, name, _from_node(name, node, place))
    return values


def _from_node(name: str, node: Any, place: str) -> object:
    """A value of the file.

    Numbers are decimal: YAML 1.1 reads 010 as 8, 1:30 as 90 and 1_0 as 10. The value of a text
    option is the text as written.
    """
    import yaml

    kind = _OPTIONS[name].kind if name in _OPTIONS else None
    if isinstance(node, yaml.ScalarNode):
        if kind in ("int", "float") and re.match(r"[-+]?[0-9]", node.value):
            if not _DECIMAL.fullmatch(node.value):
                raise ConfigError(
                    f"{place}: {node.value} is not a plain decimal number; write it without "
                    "leading "
                    "zeros, colons and underscores"
                )
            return node.value
        if kind in ("text", "choice") and not node.tag.endswith(":null"):
            return node.value
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    # PyYAML raises KeyError for !!bool and AttributeError for !!timestamp if the text is neither.
    except (ValueError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{place}: cannot be read as YAML ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """The cause of an error of yaml, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, KeyError | AttributeError):
        return "the value does not fit its tag"
    return " ".join(str(error).split())


def _value_at(place: str, name: str, value: object) -> object:
    if reason := removed.OPTIONS.get(name):
        raise ConfigError(f"{place}: {name} is removed: {reason}")
    if name not in _OPTIONS:
        raise ConfigError(f"{place}: there is no option {name!r}; peagle-serve --help lists them")
    try:
        return read(_OPTIONS[name], value)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
