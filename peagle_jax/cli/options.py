"""The command line of `peagle-generate`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle_jax.cli.command_line import (
    Parser,
    add_chat,
    add_constraints,
    add_options,
    add_removed,
    given,
)
from peagle_jax.config import EngineOptions
from peagle_jax.errors import ConfigError
from peagle_jax.options import NOT_EMPTY, option, options_of
from peagle_jax.removed import OPTIONS
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.structured import Structured

_DESCRIPTION = """\
Writes text with P-EAGLE parallel speculative decoding: a small head drafts K tokens in one pass,
the target model checks them in one pass, and the text is exactly what the target alone would write.
Without --model the small code model that comes with the package is used."""

_EPILOG = """\
prompt files (--prompts, --compare): JSON lines of HumanEval, of MT-Bench (first turns), or
  {"prompt": "text" or [token ids], "max_tokens": 64, "temperature": 0.8, ...}
comparing: --compare decodes greedily with every method and exits with 1 when an output differs
  from plain decoding's. In float32 outputs must be equal. In bfloat16 a round of K+1 rows may round
  apart from a single row, so a first differing token is forgiven, and counted in the table as a
  tie, when plain decoding gives both candidates a log-probability within 0.05 nats of its likeliest
  token.
bad prompts: a line that is not a prompt refuses its file before anything is loaded. A prompt that
  the model cannot run (too long for --max-model-len, ids outside the vocabulary) is left out: a
  line on stderr says which and why, the others run, and the exit code is 3. So it is when a text
  fails because the model's logits are not finite.
batches: --batch reads JSON lines with custom_id, method, url (/v1/chat/completions or
  /v1/completions) and body, and adds a line to the second file for each answer. A run that was
  ended goes on where it stopped. It needs the extra serve.
exit codes: 0 done, 1 outputs differ or the engine of a batch died, 2 bad input (one line says
  what), 3 done without some prompts or lines, 130 interrupted"""


_REMOVED = ("num_speculative_tokens_per_batch_size", "ngram")
_OTHERS = (
    *("seed", "num_speculative_tokens", "logprobs", "logprobs_mode", "prompt_logprobs"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
SAMPLED = tuple(name for name in options_of(SamplingParams) if name not in _OTHERS)
"""Options of all prompts that `SamplingParams` declares; `--seed` and `--logprobs` differ."""


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be layer numbers, as 2,24,45") from error


def read_structured(args: argparse.Namespace) -> Structured | None:
    """The constraint of a command line.

    Raises:
      ConfigError: more than one constraint, or a file that cannot be read or is no constraint.
    """
    options = (
        ("--json-object", args.json_object or None, lambda _: Structured.json_object()),
        ("--json-schema", args.json_schema, lambda path: Structured.json_schema(_text_of(path))),
        ("--regex", args.regex, Structured.regex),
        ("--choice", args.choice, Structured.choice),
        ("--grammar", args.grammar, lambda path: Structured.grammar(_text_of(path))),
    )
    given = [(name, value, make) for name, value, make in options if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0][0]} and {given[1][0]} exclude each other; give one of them")
    for name, value, make in given:
        try:
            return make(value)
        except OSError as error:
            raise ConfigError(f"{name} {value}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{name}: {getattr(error, 'rule', None) or error}") from error
    return None


def refuse_ineffective(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for an option that another one leaves without effect."""
    drafting = {
        "--draft-sampling sample": args.draft_sampling == "sample",
        "--verify-method token": args.verify_method == "token",
    }
    of_rounds = {
        "--adaptive": args.adaptive not in (None, "off"),
    }
    reasons = (
        (args.batch, "the lines of --batch say it", _beside_batch(args) if args.batch else {}),
        (args.compare, "--compare is greedy", drafting),
        (
            not args.compare and args.method == "none",
            "--method none has no head",
            drafting | of_rounds,
        ),
        (not args.json, "it is for --json", {"--logprobs": args.logprobs is not None}),
        (
            args.logprobs is None,
            "there are no --logprobs",
            {"--logprobs-mode sampled": args.logprobs_mode == "sampled"},
        ),
        (not args.batch, "it is for --batch", {"--prompt-logprobs": args.prompt_logprobs}),
    )
    for holds, reason, options in reasons:
        for flag, is_given in options.items():
            if holds and is_given:
                raise ConfigError(f"{flag} has no effect: {reason}; leave it out")


_NOT_OF_BATCHES = (
    *("prompt", "prompts", "limit", "compare", "chat", "system", "chat_option", "seed"),
    *("json_object", "json_schema", "regex", "choice", "grammar"),
    *("json", "show_drafts", "logprobs", *SAMPLED),
)


def _beside_batch(args: argparse.Namespace) -> dict[str, bool]:
    """Whether options that a batch leaves without effect are given."""
    defaults, flags = parser().parse_args([]), options_of(SamplingParams)
    return {
        f"--{flags[name].flag if name in flags else name.replace('_', '-')}": getattr(args, name)
        != getattr(defaults, name)
        for name in _NOT_OF_BATCHES
    }


def _text_of(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(EngineOptions):
    """Options of a model, its head and its engine, of `peagle-generate` and `peagle-serve`."""

    model: str | None = option(
        None,
        "Hugging Face folder, hub id (owner/name) or GGUF file of the target (default: the "
        "embedded model)",
        NOT_EMPTY,
        metavar="DIR",
    )
    drafter: str | None = option(
        None,
        "folder or hub id of the head, or module:Class of a drafter of your own",
        NOT_EMPTY,
        metavar="DIR",
    )
    method: Literal["peagle", "eagle3", "dflash", "none", None] = option(
        None, "drafting method; none decodes without drafts (default: the head's own)"
    )
    num_speculative_tokens: int = option(
        7, "most drafts per round (K in the papers)", short="-K", metavar="K"
    )
    adaptive: Literal["off", "load", None] = option(
        None,
        "load: choose the drafts of each round by load and acceptance, at most K; off: K is fixed "
        "(default: load)",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "dtype of weights and arithmetic; auto: bfloat16 on GPUs and TPUs, float32 on CPUs"
    )
    quantization: Literal["fp8", None] = option(
        None, "quantise an unquantised target while it is read (128x128 blocks)"
    )
    lora: str | None = option(
        None,
        "folder of a LoRA adapter that peft has saved, merged into the target while it is read",
        NOT_EMPTY,
        metavar="DIR",
    )


_OF_ENGINE = (
    *("selector", "draft_sampling", "verify_method", "tensor_parallel", "gather"),
    *("kv_cache_dtype", "activations", "prefix_caching", "max_model_len"),
    "prompt_logprobs",
)
_OF_MODEL = (
    *("model", "method", "num_speculative_tokens", "adaptive", "dtype", "quantization", "lora"),
    *_OF_ENGINE,
)


def options_of_engine(args: argparse.Namespace) -> dict[str, object]:
    """Fields of `EngineConfig` that a command line has a value for."""
    return given(args, *_OF_ENGINE)


def _add_model_options(add: Callable) -> None:
    add(
        "--drafter",
        metavar="DIR",
        action="append",
        default=[],
        help="folder or hub id of the head, or module:Class of a drafter of your own; with "
        "--compare it may be given once for each method",
    )
    add_options(add, ModelOptions, *_OF_MODEL)
    add(
        "--taps",
        type=_layer_ids,
        metavar="I,J,K",
        help="layers whose inputs the head reads, where its config.json says otherwise",
    )
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="prompts decoded at once (default: 1, with --batch 32); at 1, as with --compare, "
        "--adaptive is off by default",
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = Parser(
        prog="peagle-generate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command_line.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="text to continue")
    add("--prompts", metavar="FILE.jsonl", help="file of prompts, see below")
    add("--limit", type=int, metavar="N", help="use the first N prompts only")
    add("--compare", nargs="+", metavar="FILE_OR_PROMPT", help="compare methods on these prompts")
    add(
        "--batch",
        nargs=2,
        metavar=("IN.jsonl", "OUT.jsonl"),
        help="answer a file in OpenAI's batch form, see below",
    )
    add_chat(add)

    _add_model_options(command_line.add_argument_group("model").add_argument)

    group = command_line.add_argument_group("sampling")
    add = group.add_argument
    add_options(add, SamplingParams, *SAMPLED)
    add("--seed", type=int, default=0, metavar="N", help="prompt i samples with seed N+i")
    add_constraints(command_line.add_argument_group("structured output").add_argument)

    _add_output(command_line.add_argument_group("output").add_argument)
    add_removed(command_line, {name: OPTIONS[name] for name in _REMOVED})
    return command_line


def _add_output(add: Callable) -> None:
    add("--json", action="store_true", help="one JSON object per prompt, then a summary object")
    add(
        "--show-drafts",
        action="store_true",
        help="mark accepted drafts, refused ones, and the target's own tokens: by colour and "
        "style in a "
        "terminal (NO_COLOR: by style), else by characters",
    )
    add_options(add, SamplingParams, "logprobs", "logprobs_mode")
    add("--verbose", "-v", action="store_true", help="log what runs where and how long it takes")
    add("--no-cache", action="store_true", help="do not keep compiled programs on disk")
