"""A command of a program: its parts, and its options as a dataclass.

A field of an options class is an option. Its type says how it is read, the docstring what it means:

    @dataclass(frozen=True, kw_only=True)
    class Options(RowOptions):
        \"""Options of this command.

        Args:
          num_prompts: prompts per set
        \"""

        num_prompts: int = 4

gives `--num-prompts N`, a positive number. `option` is for what a type does not say. An option with
the name of one of engines or requests has its help and, as a `str`, its values. Nothing here
imports jax.
"""

import argparse
import dataclasses
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from peagle_jax.cli.command_line import Parser, add_removed, positive, writes_output
from peagle_jax.cli.model_folders import check_folders
from peagle_jax.config import MAX_NUM_DRAFT, ConfigError, EngineConfig
from peagle_jax.exclusions import ADAPTIVE
from peagle_jax.extras import check_address_space, check_installed
from peagle_jax.options import options_of
from peagle_jax.presets import PRESETS
from peagle_jax.removed import check_choice
from peagle_jax.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results"
PRESET_SUFFIX = "-fp8"  # suffix of presets with fp8 linear layers
METHODS = ("none", "eagle3", "peagle")
RANDOM_METHODS = (*METHODS, "dflash")  # those that a preset has random heads of
_DECLARED = {**options_of(SamplingParams), **options_of(EngineConfig)}
"""Options of requests and engines by name."""
_SHORT = {"k": "-K"}
_ENTRY = re.compile(r"^ {0,2}(\w+): (.*(?:\n {2,}(?!\w+: )\S.*)*)", re.MULTILINE)
"""An option in the docstring of its class."""


def list_of_positive(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, sorted, each once."""
    return tuple(sorted({positive(item) for item in text.split(",")}))


def list_of_methods(text: str) -> tuple[str, ...]:
    """Names of methods with commas between them."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(RANDOM_METHODS)):
        raise argparse.ArgumentTypeError(f"unknown method {unknown[0]!r}")
    return tuple(names)


def list_of_adaptive(text: str) -> tuple[str, ...]:
    """What an engine chooses, with commas between."""
    try:
        values = (check_choice("adaptive", one, ADAPTIVE) for one in text.split(","))
        return tuple(dict.fromkeys(values))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.rule) from error


class _Joined(argparse.Action):
    """Values of a list that was typed with commas, spaces or both between them."""

    def __call__(self, parser, namespace, values, option_string=None):
        joined = [value for some in values for value in some]
        if self.type is list_of_positive:
            joined.sort()
        setattr(namespace, self.dest, tuple(dict.fromkeys(joined)))


def option(
    default: Any = MISSING, *, positional: bool = False, excludes: str = "", **arguments: Any
) -> Any:
    """A field of an options class whose type does not say how it is read.

    Args:
      positional: the option has no flag.
      excludes: name of a set of options of which only one may be given.
      arguments: of `argparse.ArgumentParser.add_argument`; they win over those of the type.
    """
    own = dict(positional=positional, excludes=excludes, arguments=arguments)
    return field(default=default, metadata=own)


methods = partial(option, type=list_of_methods, action=_Joined, metavar="M,M")
adaptive = partial(option, ("off",), type=list_of_adaptive, action=_Joined, metavar="A,A")
repeatable = partial(option, (), action="append", nargs=None)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds an option for every field of `options`."""
    hints, texts = typing.get_type_hints(options), _texts(options)
    groups: dict[str, Any] = {"": parser}
    exclusive: dict[str, Any] = {}
    for own in dataclasses.fields(options):
        title = _group(options, own.name)
        target = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if name := own.metadata.get("excludes"):
            if name not in exclusive:
                exclusive[name] = target.add_mutually_exclusive_group()
            target = exclusive[name]
        flags = [_SHORT[own.name]] if own.name in _SHORT else []
        is_positional = own.metadata.get("positional", False)
        flags.append(own.name if is_positional else "--" + own.name.replace("_", "-"))
        arguments = _of_type(hints[own.name], own.default) | own.metadata.get("arguments", {})
        if hints[own.name] is str and own.name in _DECLARED:
            arguments = {"choices": _DECLARED[own.name].choices}
        if own.default is MISSING and not is_positional:
            arguments["required"] = True
        is_shown = own.default not in (MISSING, None, ()) and not isinstance(own.default, bool)
        text = texts[own.name].replace("%", "%%")
        arguments["help"] = f"{text} (default: {_typed(own.default)})" if is_shown else text
        # argparse appends to its default in place; `Options.of` replaces None by the field's.
        default = None if own.default is MISSING or own.default == () else own.default
        if arguments.get("action") != "store_true":
            arguments["default"] = default
        target.add_argument(*flags, **arguments)


def _texts(options: type) -> dict[str, str]:
    """What the docstrings of a class and its bases, or `_DECLARED`, say of each option."""
    found = {name: one.help for name, one in _DECLARED.items()}
    for one in reversed(options.__mro__):
        for name, text in _ENTRY.findall(inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            found[name] = " ".join(text.split())
    return found


def _group(options: type, name: str) -> str:
    """Title in `--help`: that of the class that first declared the option."""
    declares = lambda one: name in inspect.get_annotations(one)
    return next(filter(declares, reversed(options.__mro__))).__dict__.get("group", "")


def _of_type(hint: Any, default: Any) -> dict[str, Any]:
    """Arguments of argparse for a type."""
    is_optional = type(None) in typing.get_args(hint)
    if is_optional:
        (hint,) = set(typing.get_args(hint)) - {type(None)}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if hint is bool:
        yes_or_no = is_optional or default is True
        return {"action": argparse.BooleanOptionalAction if yes_or_no else "store_true"}
    if hint == tuple[int, ...]:
        return {"type": list_of_positive, "metavar": "N,N", "nargs": "+", "action": _Joined}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": "X"}
    metavar = {int: "N", float: "X", Path: "FILE", str: "NAME"}[hint]
    return {"type": positive if hint is int else hint, "metavar": metavar}


def _typed(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    if isinstance(value, Path):
        here = Path.cwd()
        return str(value.relative_to(here) if value.is_relative_to(here) else value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From values by name. Lists become tuples, None the default; other names are ignored."""
        names = {one.name for one in dataclasses.fields(cls)} & values.keys()
        frozen = lambda value: tuple(value) if isinstance(value, list) else value
        return cls(**{name: frozen(values[name]) for name in names if values[name] is not None})

    def check(self) -> None:
        """Finds mistakes before anything runs.

        Raises:
          ConfigError: an option is invalid.
        """


@dataclass(frozen=True, kw_only=True)
class RowFileOptions(Options):
    """Options of a command that appends rows.

    Args:
      out: file to which rows are appended
      sha: commit to write into rows; PEAGLE_SHA or the checkout's own without it
    """

    group: ClassVar[str] = "rows"
    out: Path = RESULTS / "rows.jsonl"
    sha: str | None = None

    @property
    def commit(self) -> str | None:
        """The commit that was given; None leaves it to git."""
        return self.sha or os.environ.get("PEAGLE_SHA")


@dataclass(frozen=True, kw_only=True)
class RowOptions(RowFileOptions):
    """Options of a command that compiles programs and appends rows.

    Args:
      no_cache: do not keep compiled programs on disk
    """

    group: ClassVar[str] = "rows"
    no_cache: bool = False

    @property
    def programs_folder(self) -> Path | None:
        """Where engines keep compiled programs, as in `EngineConfig`."""
        from peagle_jax.cli import runs

        return None if self.no_cache else runs.programs_folder(os.environ.get("XDG_CACHE_HOME"))

    def environment(self) -> dict:
        """Fields that all rows of one command share. Also enables the compilation cache."""
        from bench import rows
        from peagle_jax.cli import runs

        environment = rows.environment(self.commit)
        if not self.no_cache:
            runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
        return environment


@dataclass(frozen=True, kw_only=True)
class CellOptions(RowOptions):
    """Options of a command that measures engines by method, K and concurrency.

    Args:
      concurrency: requests at once
      adaptive: off: K is fixed; load: the engine chooses the drafts of each round; off,load:
        compares both
    """

    concurrency: tuple[int, ...] = (1, 8, 32)
    adaptive: tuple[str, ...] = adaptive()


@dataclass(frozen=True, kw_only=True)
class FormatOptions(RowOptions):
    """Options of a command that has weights.

    Args:
      dtype: type of weights and activations; auto: bfloat16 on an accelerator, float32 on a CPU
    """

    group: ClassVar[str] = "model"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    activations: str = EngineConfig.activations


@dataclass(frozen=True, kw_only=True)
class EngineOptions(FormatOptions):
    """Options of a command that chooses the sizes of its engines, also of full-size models.

    Args:
      layers: the first N layers of the preset only
      prefill_chunk: tokens per prefill call
      prefill_rows: prompts per prefill call
    """

    layers: int | None = None
    prefill_chunk: int = 512
    prefill_rows: int = 8
    tensor_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelOptions(FormatOptions):
    """Options of a command that loads a target and its heads.

    Args:
      model: Hugging Face folder of the target; the embedded model without it
      drafter: folder of a draft head; repeatable, those of the embedded model without it
      model_name: name of the model in rows; the name of its folder without it
      methods: methods to run: none (plain decoding), eagle3, peagle
      k: numbers of drafts per round
      prompt_tokens: length of prompts that are cut from plain text
    """

    group: ClassVar[str] = "model"
    model: str | None = None
    drafter: tuple[str, ...] = repeatable(metavar="DIR")
    model_name: str | None = None
    methods: tuple[str, ...] = methods(METHODS)
    k: tuple[int, ...] = (3, 5, 7)
    max_tokens: int = 128
    prompt_tokens: int = 128

    def check(self) -> None:
        super().check()
        check_num_drafts(self.k)
        longest = getattr(self, "max_model_len", EngineConfig.max_model_len)
        check_folders(self.model, self.drafter, EngineConfig(max_model_len=longest))


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ModelOptions):
    """Options of a command that decodes prompt sets with the loaded models.

    Args:
      chat: send prompts of JSON lines through the model's chat template; default: where --model
        has one
    """

    chat: bool | None = None
    max_model_len: int = 2048
    temperature: float = 0.0
    draft_sampling: str = EngineConfig.draft_sampling
    ignore_eos: bool = False


REMOVED = {
    "ngram": "drafts that are copied from the text did not pay; leave it out",
    **dict.fromkeys(
        ("verify-method", "no-selector", "quantization"), "no row had it; leave it out"
    ),
}
"""Options that `SweepOptions` had."""


def check_num_drafts(some: Sequence[int]) -> None:
    """Raises `ConfigError` for more drafts than a round can have."""
    for k in some:
        if k > MAX_NUM_DRAFT:
            raise ConfigError(f"-K {k} is above {MAX_NUM_DRAFT}, the most drafts of a round")


def check_preset(name: str) -> None:
    """Raises `ConfigError` for an unknown preset."""
    if name.removesuffix(PRESET_SUFFIX) not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command; `COMMAND` of its module.

    Args:
      examples: command lines without the program's name.
      description: text of `--help`.
      options: its class of options.
      run: runs the command and returns the exit code.
      removed: options that the version before had, and why they are no more.
    """

    examples: tuple[str, ...]
    description: str
    options: type[Options]
    run: Callable[[Any], int]
    removed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of several commands. A command's module is imported when the command is used.

    Args:
      package: of the modules; that of the command `serve-load` is `serve_load`.
      commands: name -> one line for `--help`.
      removed: names that the version before had, and why they are no more.
      extras: name -> the extra of `peagle_jax.extras` that the command needs.
    """

    name: str
    package: str
    about: str
    commands: Mapping[str, str]
    removed: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)

    def load(self, name: str) -> Command:
        """The command with a name.

        Raises:
          ConfigError: a package that it needs is not installed.
        """
        if name in self.extras:
            check_installed(self.extras[name], f"{self.name} {name}")
        return importlib.import_module(f"{self.package}.{name.replace('-', '_')}").COMMAND

    def parser(self, names: Sequence[str] | None = None) -> argparse.ArgumentParser:
        """The command line: the name of a command in `command`, and the values of its options.

        Args:
          names: the commands whose options are added; None: all.
        """
        wide = max(map(len, self.commands))
        listed = [f"  {name:<{wide}}  {summary}" for name, summary in self.commands.items()]
        last = f"{self.name} COMMAND --help lists the options of a command."
        form = argparse.RawDescriptionHelpFormatter
        made = Parser(
            prog=self.name,
            usage=f"{self.name} COMMAND [options]",
            description="\n".join([self.about, *listed, "", last]),
            formatter_class=form,
        )
        commands = made.add_subparsers(
            dest="command",
            required=True,
            parser_class=Parser,
            metavar="COMMAND",
            help=argparse.SUPPRESS,
            prog=self.name,
        )
        for name in self.commands:
            if names is not None and name not in names:
                commands.add_parser(name)
                continue
            command = self.load(name)
            examples = [f"  {self.name} {line}" for line in command.examples]
            text = "\n".join([command.description.strip(), "", *examples])
            parser = commands.add_parser(name, description=text, formatter_class=form)
            add_options(parser, command.options)
            add_removed(parser, command.removed)
        return made

    def parse(self, argv: Sequence[str]) -> tuple[Command, Options]:
        """The command of some arguments, and its options, not yet checked."""
        if argv and argv[0] in self.removed:
            raise ConfigError(f"{argv[0]} is removed: {self.removed[argv[0]]}")
        values = vars(self.parser(argv[:1]).parse_args(argv))
        command = self.load(values["command"])
        return command, command.options.of(values)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Entry point; returns the exit code."""
        if argv is None:  # the end by `timeout` too keeps rows and ends servers
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            argv = sys.argv[1:]
        return writes_output(self.name)(self._main)(argv)

    def _main(self, argv: Sequence[str]) -> int:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        try:
            command, options = self.parse(argv)
            check_address_space()
            options.check()
            if isinstance(options, RowFileOptions):
                check_out(options.out)
            return command.run(options)
        except ConfigError as error:
            print(f"{self.name}: error:", " ".join(str(error).split()), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted; the rows so far are kept", file=sys.stderr)
            return 130


def check_out(out: Path) -> None:
    """Raises ConfigError if rows cannot be written to `out`: before anything is measured."""
    existing = next(one for one in (out, *out.absolute().parents) if one.exists())
    is_in_place = existing.is_file() if existing == out else existing.is_dir()
    if not is_in_place or not os.access(existing, os.W_OK):
        raise ConfigError(f"--out {out}: cannot be written")


def exit_code(prompts_left_out: int) -> int:
    """3 for a run that skipped some prompts."""
    return 3 if prompts_left_out else 0
