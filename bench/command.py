"""A command of `peagle-bench`: its parts, and its options as a dataclass.

A field of an options class states the flag, type, default and help of one option:

    @dataclass(frozen=True, kw_only=True)
    class Options(RowOptions):
        num_prompts: int | None = option("per set", default=None, type=positive, metavar="N")

gives `--num-prompts N`. Nothing here imports jax, so mistakes and `--help` are shown at once.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from peagle_jax.cli.command_line import positive
from peagle_jax.cli.model_folders import check_folders
from peagle_jax.config import MAX_NUM_DRAFT, ConfigError, EngineConfig
from peagle_jax.draft_schedule import adaptive_of
from peagle_jax.models.presets import PRESETS

RESULTS = Path(__file__).parent / "results"
PRESET_SUFFIX = "-fp8"  # suffix of presets with fp8 linear layers
METHODS = ("none", "eagle3", "peagle")
_GROUPS = ("model", "rows")
"""Titles of options in `--help`, after the options without a title."""


def list_of_positive(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, sorted, each once."""
    return tuple(sorted({positive(item) for item in text.split(",")}))


class _Joined(argparse.Action):
    """Values of a list that was typed with commas, spaces or both between them."""

    def __call__(self, parser, namespace, values, option_string=None):
        joined = [value for some in values for value in some]
        if self.type is not list_of_methods:
            joined.sort()
        setattr(namespace, self.dest, tuple(dict.fromkeys(joined)))


class _Removed(argparse.Action):
    """A flag that is no more: it refuses itself with the reason."""

    def __init__(self, reason: str, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._reason = reason

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is removed: {self._reason}")


def list_of_methods(text: str) -> tuple[str, ...]:
    """Names of methods with commas between them."""
    names = text.split(",")
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown method {unknown[0]!r}")
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class _Option:
    """How the command line shows a field.

    Args:
      group: title under which `--help` lists it, of `_GROUPS`; "" lists it first.
      excludes: name of a set of options of which only one may be given.
    """

    help: str
    short: str | None
    positional: bool
    group: str
    excludes: str
    arguments: Mapping[str, Any]


def option(
    help: str, *, default: Any = MISSING, short: str | None = None, positional: bool = False,
    group: str = "", excludes: str = "", **arguments: Any,
) -> Any:  # fmt: skip
    """A field of an options class. Without a default the option is required.

    Args:
      help: text of `--help`; the default is appended.
      short: a second, short flag.
      positional: the option has no flag.
      arguments: further arguments of `argparse.ArgumentParser.add_argument`.
    """
    settings = _Option(
        help=help, short=short, positional=positional, group=group, excludes=excludes,
        arguments=arguments,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={"option": settings})


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds an option for every field of `options` that `option` made."""
    fields = [field for field in dataclasses.fields(options) if "option" in field.metadata]
    shown = [(field, field.metadata["option"]) for field in fields]
    titles = [title for title in _GROUPS if any(one.group == title for _, one in shown)]
    groups = {"": parser} | {title: parser.add_argument_group(title) for title in titles}
    exclusive: dict[str, Any] = {}
    for field, one in shown:
        target = groups[one.group]
        if one.excludes:
            if one.excludes not in exclusive:
                exclusive[one.excludes] = target.add_mutually_exclusive_group()
            target = exclusive[one.excludes]
        target.add_argument(*_flags(field.name, one), **_arguments(field, one))


def _flags(name: str, one: _Option) -> list[str]:
    if one.positional:
        return [name]
    return [*([one.short] if one.short else []), "--" + name.replace("_", "-")]


def _arguments(field: dataclasses.Field, one: _Option) -> dict[str, Any]:
    arguments = dict(one.arguments, help=one.help.replace("%", "%%"))
    if arguments.get("type") in (list_of_positive, list_of_methods):
        arguments |= dict(nargs="+", action=_Joined)
    if field.default is MISSING:
        return arguments | ({} if one.positional else {"required": True})
    if field.default is False:
        return arguments | {"action": "store_true"}
    if field.default is not None and field.default is not True and field.default != ():
        arguments["help"] += f" (default: {_as_typed(field.default, one)})"
    # argparse appends to its default in place; `Options.of` replaces None by the field's default.
    is_list = arguments.get("action") == "append"
    return arguments | {"default": None if is_list else field.default}


def _as_typed(value: Any, one: _Option) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple):
        return (" " if "nargs" in one.arguments else ",").join(
            _as_typed(item, one) for item in value
        )
    if isinstance(value, Path):
        return os.path.relpath(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From values by name. Lists become tuples, None the default; other names are ignored."""
        names = {field.name for field in dataclasses.fields(cls)} & values.keys()
        frozen = lambda value: tuple(value) if isinstance(value, list) else value
        return cls(**{name: frozen(values[name]) for name in names if values[name] is not None})

    def check(self) -> None:
        """Finds mistakes before jax is imported.

        Raises:
          ConfigError: an option is invalid.
        """


def rows_file(name: str) -> Any:
    """The option `--out` with a default in bench/results."""
    return option(
        "file to which rows are appended", default=RESULTS / name, group="rows", type=Path,
        metavar="FILE.jsonl",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RowFileOptions(Options):
    """Options of a command that appends rows."""

    out: Path = rows_file("rows.jsonl")
    sha: str | None = option(
        "commit to write into rows; PEAGLE_SHA or the checkout's own without it", default=None, group="rows"
    )  # fmt: skip

    @property
    def commit(self) -> str | None:
        """The commit that was given; None leaves it to git."""
        return self.sha or os.environ.get("PEAGLE_SHA")


@dataclass(frozen=True, kw_only=True)
class RowOptions(RowFileOptions):
    """Options of a command that compiles programs and appends rows."""

    no_cache: bool = option("do not keep compiled programs on disk", default=False, group="rows")

    def environment(self) -> dict:
        """Fields that all rows of one command share. Also enables the compilation cache."""
        from bench import rows
        from peagle_jax.cli import runs

        environment = rows.environment(self.commit)
        if not self.no_cache:
            runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
        return environment


def methods_option(default: tuple[str, ...]) -> Any:
    return option(
        "methods to run: none (plain decoding), eagle3, peagle", default=default, group="model", type=list_of_methods,
        metavar="M,M",
    )  # fmt: skip


def k_option(default: tuple[int, ...]) -> Any:
    return option(
        "numbers of drafts per round", default=default, short="-K", group="model", type=list_of_positive,
        metavar="K,K",
    )  # fmt: skip


def _adaptive(text: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(map(adaptive_of, text.split(","))))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.rule) from error


def adaptive_option() -> Any:
    return option(
        "off: K is fixed; load: the engine chooses the drafts of each round; off,load compares both", default=("off",),
        type=_adaptive, metavar="A,A",
    )  # fmt: skip


def rounds_per_call_option() -> Any:
    return option(
        "rounds that one call of a greedy batch runs; the engine's choice without it", default=None, type=positive,
        metavar="N",
    )  # fmt: skip


def chat_option() -> Any:
    return option(
        "send prompts of JSON lines through the model's chat template; default: where --model has one", default=None,
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip


def jobs_option() -> Any:
    return option(
        "processes that compile all programs onto disk before the first cell; each takes 2 to 4 GB of memory of the host",
        default=1, type=positive, metavar="N",
    )  # fmt: skip


def gather_option() -> Any:
    return option(
        "how several devices exchange arrays: by collectives of the library, or by kernels that write to their peers; "
        "auto: peers on Hopper GPUs linked by NVLink", default="auto", choices=("auto", "library", "peers"),
    )  # fmt: skip


def check_jobs(options: "RowOptions") -> None:
    """Raises `ConfigError` if `--jobs` is given and programs are not kept on disk."""
    if options.jobs > 1 and options.no_cache:
        raise ConfigError("--jobs compiles programs onto disk, which --no-cache excludes: drop one")


def dtype_option(group: str = "") -> Any:
    return option(
        "type of weights and activations; auto: bfloat16 on an accelerator, float32 on a CPU", default="auto", group=group,
        choices=("auto", "float32", "bfloat16"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RowOptions):
    """Options of a command that loads a target and its heads."""

    model: str | None = option(
        "Hugging Face folder of the target; the embedded model without it", default=None,
        group="model", metavar="DIR",
    )  # fmt: skip
    drafter: tuple[str, ...] = option(
        "folder of a draft head; repeatable, those of the embedded model without it", default=(), group="model",
        action="append", metavar="DIR",
    )  # fmt: skip
    model_name: str | None = option(
        "name of the model in rows; the name of its folder without it", default=None, group="model",
        metavar="NAME",
    )  # fmt: skip
    methods: tuple[str, ...] = methods_option(METHODS)
    k: tuple[int, ...] = k_option((3, 5, 7))
    dtype: str = dtype_option("model")
    quantization: str | None = option(
        "quantise the target's matrices while reading",
        default=None,
        group="model",
        choices=("fp8",),
    )
    activations: str = option(
        "how fp8 weights of the target read activations; fp8: quantised; mxfp8: quantised, and so are its weights",
        default="bf16", group="model", choices=("bf16", "fp8", "mxfp8"),
    )  # fmt: skip
    max_tokens: int = option("new tokens per prompt", default=128, type=positive, metavar="N")
    prompt_tokens: int = option(
        "length of prompts that are cut from plain text", default=128, type=positive, metavar="N"
    )

    def check(self) -> None:
        check_num_drafts(self.k)
        longest = getattr(self, "max_model_len", EngineConfig.max_model_len)
        check_folders(self.model, self.drafter, EngineConfig(max_model_len=longest))


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ModelOptions):
    """Options of a command that decodes prompt sets with the loaded models."""

    max_model_len: int = option(
        "most tokens of a prompt and its output together", default=2048, type=positive, metavar="N"
    )
    temperature: float = option("temperature; 0: greedy", default=0.0, type=float, metavar="T")
    ignore_eos: bool = option("go on after the end-of-text token", default=False)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(SweepOptions):
    """Options of a sweep that may also change how heads draft and how drafts are verified."""

    draft_sampling: str = option(
        "above temperature 0: draft the head's likeliest tokens, or draw them", default="argmax",
        choices=("argmax", "sample"),
    )  # fmt: skip
    verify_method: str = option(
        "accept sampled drafts one by one, or in a block", default="token",
        choices=("token", "block"),
    )  # fmt: skip
    ngram: int = option(
        "copy up to 15 drafts from where the last N tokens occurred before; 0: never", default=0,
        type=int, metavar="N",
    )  # fmt: skip
    no_selector: bool = option("ignore the head's selector", default=False)

    def drafting(self) -> dict[str, object]:
        """Fields of `EngineConfig`."""
        return dict(
            draft_sampling=self.draft_sampling,
            verify_method=self.verify_method,
            selector=not self.no_selector,
            ngram=self.ngram,
        )

    def drafting_row(self, kind: str) -> dict[str, object]:
        """Fields of a row: its kind, "drafting" with what differs from an engine's defaults, if anything does."""
        default = EngineConfig()
        changed = {k: v for k, v in self.drafting().items() if v != getattr(default, k)}
        return {"kind": "drafting" if changed else kind, **changed}


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
    """One command.

    Args:
      summary: one line of `peagle-bench --help`.
      examples: command lines without `peagle-bench`; `peagle-bench --help` shows the first.
      description: text of `peagle-bench NAME --help`.
      options: its class of options.
      run: runs the command and returns the exit code.
      removed: flags that the version before had, and why they are no more.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    description: str
    options: type[Options]
    run: Callable[[Any], int]
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def add_to(self, commands) -> None:
        """Adds its parser to the subparsers `commands`."""
        examples = [f"  peagle-bench {line}" for line in self.examples]
        parser = commands.add_parser(
            self.name,
            description="\n".join([self.description.strip(), "", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(parser, self.options)
        refuse_removed(parser, self.removed)


def refuse_removed(parser: argparse.ArgumentParser, removed: Mapping[str, str]) -> None:
    """Lets the parser refuse each flag of `removed` with its reason."""
    for flag, reason in removed.items():
        action = partial(_Removed, reason)
        parser.add_argument(flag, nargs="*", action=action, help=argparse.SUPPRESS)


def show(header: list[str], lines: list[list[str]], out: Path, *, note: str = "") -> None:
    """Prints a table of the new rows, and the file that has them."""
    from peagle_jax.cli import runs

    print(runs.table(header, lines))
    print(f"{note}rows: {out}")


def exit_code(prompts_left_out: int) -> int:
    """3 for a run that skipped some prompts."""
    return 3 if prompts_left_out else 0
