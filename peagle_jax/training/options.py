"""The command line of `peagle-train`: its stages and their options."""

import argparse
import math
from functools import partial
from pathlib import Path

from peagle_jax.cli.command_line import DefaultsFormatter, Parser, add_removed
from peagle_jax.config import ConfigError
from peagle_jax.training.loggers import LOGGERS, check_loggers

_EPILOG = """\
a head for your model, from prompts:
  peagle-train head --target DIR --prompts prompts.jsonl --out run

A stage writes only under --out and goes on where it stopped when it is started again. The head
lies in OUT/final, beside OUT/head with train.csv, eval.csv and curves.png.
exit codes: 0 done, 2 bad input (one line says what), 130 interrupted
"""
_GONE = "is removed: it made only the embedded model, as peagle_jax/assets/README.md says"
_OF_HEAD = (
    "is a part of `peagle-train head` now, which takes its prompts and writes the texts itself"
)
REMOVED = {
    "data": _GONE,
    "target": _GONE,
    "continuations": "is removed: `peagle-train head --answers-only` lets the engine write texts",
    "drafter": _OF_HEAD,
    "selector": _OF_HEAD,
}
"""Stages of earlier versions, and why they are refused."""
_ZERO_IS_FINE = {"temperature", "temperatures", "seed", "mask_token_id", "num_heldout"}


def _add_share(parser) -> None:
    parser.add_argument(
        "--share",
        nargs="+",
        choices=("embedding", "unembedding"),
        default=[],
        help="tables of the target that the head reads and does not train: a smaller head "
        "(default: none)",
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft only the N most frequent tokens of the texts: faster rounds (default: all)",
    )


def _add_engine_options(parser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--concurrency", type=int, help="texts at once (default: 256, on a CPU 8)")
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: bfloat16 on GPUs and TPUs, float32 on CPUs",
    )
    group.add_argument("--seed", type=int, default=0, help="of sampling and training")


def _add_synthesize(commands) -> None:
    parser = commands.add_parser("synthesize", help="let a chat model ask itself questions")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of prompts.jsonl")
    parser.add_argument("--num", type=int, default=20_000, help="questions sampled")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a question")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="of the questions; below 1, because small models write nonsense there",
    )
    parser.add_argument(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="evaluation prompts: questions that share ten words in a row with them are left out",
    )
    _add_engine_options(parser)


def _add_head_shape(parser) -> None:
    group = parser.add_argument_group("the head")
    group.add_argument(
        "--method", choices=("peagle", "eagle3", "dflash"), default="peagle", help="kind of head"
    )
    group.add_argument(
        "--layers", type=int, help="default 4 for peagle, 5 for dflash, 1 for eagle3"
    )
    _add_share(group)


def _add_steps(group) -> None:
    group.add_argument("--epochs", type=float, default=6.0, help="passes over the texts")
    group.add_argument("--step-tokens", type=int, default=16_384, help="tokens of a step")
    group.add_argument(
        "--num-devices", type=int, default=1, metavar="N", help="GPUs that share each step's texts"
    )


def _add_length(group) -> None:
    group.add_argument("--length", type=int, default=1024, help="tokens of a training row")


def _add_head(commands) -> None:
    text = "a head for your model: answers to prompts, then the recommended training"
    parser = commands.add_parser("head", help=text, description=text, epilog=_EPILOG)
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines of prompts or chats ({messages: [...]}), text files, or folders of text",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of everything written")
    parser.add_argument(
        "--minutes", type=float, help="of training, instead of --epochs; answers take their time"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="read the prompts, print the plan, and end"
    )
    _add_head_shape(parser)
    head = parser.add_argument_group("more of the head")
    head.add_argument(
        "--init", type=Path, metavar="HEAD", help="train this head further, in its own shape"
    )
    head.add_argument(
        "--selector",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="peagle: train a selector too, in a fifth of the time (default)",
    )
    add_removed(parser, {"selector-kind": "at equal minutes a lattice had no more AL than pairs"})
    head.add_argument("--mask-token-id", type=int, help="default: a reserved token of the target")
    head.add_argument(
        "--speculators",
        action="store_true",
        help="also write the head in the layout of speculators, without its selector: "
        "OUT/speculators",
    )
    _add_texts(parser.add_argument_group("texts"))
    _add_training(parser.add_argument_group("training"))
    _add_engine_options(parser)


def _add_texts(group) -> None:
    _add_length(group)
    group.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    group.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0, 0, 0, 0.7, 0, 0, 0, 1],
        help="of the answers, in turn (default: three quarters greedy)",
    )
    group.add_argument("--num-heldout", type=int, default=128, help="prompts of the evaluation")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send prompts through the chat template (default: if the target has one)",
    )
    group.add_argument("--prompt-tokens", type=int, default=64, help="of prompts cut from text")
    group.add_argument(
        "--answers-only", action="store_true", help="stop before the training, after the plan"
    )


def _add_training(group) -> None:
    _add_steps(group)
    group.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="cool down and end when N evaluations in turn are no better (default: never)",
    )
    group.add_argument(
        "--log-to",
        nargs="+",
        choices=LOGGERS,
        default=[],
        help="curves beside OUT/head/*.csv and curves.png (default: none)",
    )
    group.add_argument(
        "--states-gb",
        type=float,
        metavar="GB",
        help="first write the target's states of all texts to disk, at most so much: for a target "
        "that has no room beside its head",
    )


def _add_plan(commands) -> None:
    parser = commands.add_parser("plan", help="memory and time of a training; loads no weights")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", type=Path, help="model folder")
    target.add_argument("--preset", metavar="NAME", help="released sizes, as gpt-oss-20b")
    parser.add_argument("--bits", type=float, default=16, help="of a preset's weight: 16, 8, 4.25")
    parser.add_argument("--texts", type=int, default=10_000, help="training rows")
    parser.add_argument("--tflops", type=float, help="of the device; default: measured here")
    _add_head_shape(parser)
    group = parser.add_argument_group("training")
    _add_length(group)
    _add_steps(group)


def parser() -> argparse.ArgumentParser:
    """The argument parser; the attribute `stage` of its result names the stage."""
    command_line = Parser(
        prog="peagle-train",
        description="Trains a draft head for a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(
        required=True,
        metavar="stage",
        dest="stage",
        parser_class=partial(Parser, formatter_class=DefaultsFormatter),
    )
    for add in (_add_head, _add_synthesize, _add_plan):
        add(commands)
    return command_line


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_number(name: str, value: float) -> None:
    least = 0 if name in _ZERO_IS_FINE else 1 if isinstance(value, int) else None
    if least is None and not 0 < value < math.inf:
        raise ConfigError(f"{_flag(name)} {value} must be a number above 0")
    if least is not None and not least <= value < math.inf:
        raise ConfigError(f"{_flag(name)} {value} must be at least {least}")


def _why_no_folder(target: Path) -> str:
    from peagle_jax.checkpoint.gguf_file import is_gguf  # numpy: not needed for --help
    from peagle_jax.checkpoint.hub import is_hub_id

    if is_gguf(target) and target.exists():
        return f"is no folder; `peagle-convert gguf {target} FOLDER` makes one"
    if is_hub_id(str(target)):
        return f"no such folder, and hub ids are not read here: `hf download {target}` makes one"
    return "no such folder"


def _check_paths(args) -> None:
    target, init, out = (getattr(args, name, None) for name in ("target", "init", "out"))
    if target is not None and not target.is_dir():
        raise ConfigError(f"--target {target}: {_why_no_folder(target)}")
    if init is not None and not init.is_dir():
        raise ConfigError(f"--init {init}: no such folder")
    for name in ("prompts", "exclude"):
        for path in getattr(args, name, ()):
            if not path.exists():
                raise ConfigError(f"{_flag(name)} {path}: no such file")
    for path in () if out is None else (out, *out.parents):
        if path.is_file():
            raise ConfigError(f"--out {path}: is a file; give a folder")


def _check_effects(args) -> None:
    """Refuses options that the head of this method, or without a selector, does not have."""
    method = f"--method {args.method}"
    if getattr(args, "init", None) is not None:
        for name in ("layers", "share", "draft_vocab", "mask_token_id"):
            if getattr(args, name):
                raise ConfigError(f"{_flag(name)} has no effect: --init has the head's shape")
    if args.method == "dflash":
        for name in ("share", "draft_vocab"):
            if getattr(args, name):
                raise ConfigError(
                    f"{_flag(name)} has no effect: {method} drafts from the target's tables"
                )
    if args.method == "eagle3" and "embedding" in args.share:
        raise ConfigError(
            f"--share embedding has no effect: {method} reads the target's embedding anyway"
        )


def check(args) -> None:
    """Validates the options before jax is imported.

    Raises:
      ConfigError: a number out of range, a file that is not there, or an option without effect.
    """
    for name, value in vars(args).items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and not isinstance(one, bool):
                _check_number(name, one)
    _check_paths(args)
    if args.stage != "synthesize":
        _check_effects(args)
    check_loggers(getattr(args, "log_to", ()))
