"""The command line of `peagle-train`: its stages and their options."""

import argparse
import math
from functools import partial
from pathlib import Path

from peagle_jax.cli.command_line import DefaultsFormatter, Parser
from peagle_jax.config import ConfigError

_EPILOG = """\
a head for your model, from prompts:
  peagle-train head --target DIR --prompts prompts.jsonl --out run

a target of your own and its heads, stage by stage:
  peagle-train data --out run/data /usr/lib/python3.12 .venv/lib/python3.12/site-packages
  peagle-train target --data run/data --out run/target --minutes 5
  peagle-train continuations --data run/data --target run/target/final --out run/text
  peagle-train drafter --method peagle --target run/target/final --text run/text --out run/peagle --minutes 4
  peagle-train drafter --method eagle3 --target run/target/final --text run/text --out run/eagle3 --minutes 2
  peagle-train selector --head run/peagle/final --target run/target/final --text run/text --out run/selector --minutes 2

Every stage writes only under --out and goes on where it stopped when it is started again. Trained
models lie in OUT/final in the Hugging Face layout, beside train.csv, eval.csv and curves.png.
"""
_ZERO_IS_FINE = {
    "temperature",
    "seed", "warmup", "mask_token_id", "num_heldout", "weight_decay", "decay", "repeat_weight",
    "max_temperature", "function_copies", "exercises", "cut_every", "penalty", "taps",
    "temperatures",
}  # fmt: skip
_SHARES = {"header_share"}
_PATHS = ("prompts", "exclude")
_FOLDERS = ("data", "target", "text", "long_text", "init", "head")  # made by earlier stages
_WRITTEN = ("train.npz", "continuations")
_FILES = {"data": ("tokenizer.json", "data"), "text": _WRITTEN, "long_text": _WRITTEN}
"""A file that such a folder must have, and the stage that writes it."""


def _add_run_options(parser, *, learning_rate, adam_learning_rate, microbatches, log_every):
    group = parser.add_argument_group("training run")
    budget = group.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps")
    budget.add_argument(
        "--minutes",
        type=float,
        help="time budget; the number of steps is fixed when the cool-down has to begin",
    )
    group.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    group.add_argument("--learning-rate", type=float, default=learning_rate, help="peak")
    group.add_argument(
        "--adam-learning-rate",
        type=float,
        default=adam_learning_rate,
        help="peak for embeddings, unembedding and vectors when --optimizer muon",
    )
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    group.add_argument("--decay", type=float, default=0.4, help="share of the run that cools down")
    group.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    group.add_argument(
        "--microbatches",
        type=int,
        default=microbatches,
        help="pieces of a batch, gradients accumulated: less memory",
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--log-every", type=int, default=log_every)
    group.add_argument("--eval-every", type=int, default=500)
    group.add_argument("--save-every", type=int, default=500)


def _add_compute_options(parser, *, loss_chunk):
    group = parser.add_argument_group("arithmetic")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    group.add_argument(
        "--attention",
        choices=("auto", "xla", "cudnn"),
        default="auto",
        help="causal attention; auto is cuDNN's for bfloat16 on an NVIDIA GPU",
    )
    group.add_argument(
        "--loss-chunk",
        type=int,
        default=loss_chunk,
        help="rows whose logits exist at a time",
    )


def _add_data(commands):
    parser = commands.add_parser("data", help="source files -> tokenizer and token streams")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of Python source")
    parser.add_argument("--out", type=Path, required=True)
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--vocab-size", type=int, default=8192)
    vocabulary.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json to encode with, instead of training one"
    )
    parser.add_argument("--sample-mb", type=float, default=40, help="text the BPE is trained on")
    parser.add_argument("--max-mb", type=float, default=500, help="text encoded at most")
    parser.add_argument("--num-headers", type=int, default=60_000, help="function heads kept")
    parser.add_argument(
        "--function-copies",
        type=int,
        default=0,
        metavar="N",
        help="also train on N copies of each function with a docstring, as documents of their own, so "
        "that the target ends its answers where a function ends",
    )
    parser.add_argument(
        "--exercises",
        type=int,
        default=0,
        metavar="N",
        help="also train on N generated functions with docstrings, as documents of their own",
    )
    parser.add_argument(
        "--cut-every",
        type=int,
        default=0,
        metavar="N",
        help="cut the training text once in N characters on average and encode the pieces apart, so that the "
        "target continues prompts that end anywhere, also in a line break",
    )
    parser.add_argument("--seed", type=int, default=0)


def _add_target(commands):
    parser = commands.add_parser("target", help="train the target model on token streams")
    parser.add_argument("--data", type=Path, required=True, help="folder written by `data`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--init", type=Path, help="target to train further; give its shape if it is not the default"
    )
    penalty = parser.add_argument_group("penalty on repeats")
    penalty.add_argument(
        "--text",
        type=Path,
        help="folder of `continuations` of this target: greedy texts whose repeated 8-grams become unlikely",
    )
    penalty.add_argument("--text-batch", type=int, default=64, help="texts per step")
    penalty.add_argument(
        "--penalty", type=float, default=1.0, help="weight of a repeated token; one of source has 1"
    )
    shape = parser.add_argument_group("model (Qwen3 architecture)")
    for name, default in (
        ("hidden-size", 256), ("layers", 12), ("heads", 4), ("kv-heads", 2), ("head-dim", 64),
        ("intermediate-size", 768), ("max-position", 2048),
    ):  # fmt: skip
        shape.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    shape.add_argument("--rope-theta", type=float, default=10_000.0)
    batch = parser.add_argument_group("batch")
    batch.add_argument("--sequence", type=int, default=1024)
    batch.add_argument("--batch", type=int, default=256, help="sequences per step")
    batch.add_argument("--eval-sequences", type=int, default=256)
    _add_run_options(
        parser, learning_rate=4e-3, adam_learning_rate=3e-3, microbatches=2, log_every=50
    )
    _add_compute_options(parser, loss_chunk=8192)


def _add_continuations(commands):
    parser = commands.add_parser("continuations", help="let the target write the drafters' text")
    parser.add_argument("--data", type=Path, required=True, help="folder written by `data`")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=100_000, help="texts")
    parser.add_argument("--num-heldout", type=int, default=512, help="greedy, from held-out files")
    parser.add_argument("--length", type=int, default=512, help="tokens of prompt and continuation")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--min-prompt", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=192)
    parser.add_argument(
        "--header-share", type=float, default=0.3, help="prompts that are function heads"
    )
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0, 0, 0.7, 0, 0, 1],
        help="cycled over the texts (default: two thirds greedy, the rest at 0.7 and 1)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)


def _add_law(parser) -> None:
    law = parser.add_argument_group("what is trained")
    law.add_argument("--depths", type=int, help="K_train; default 8 for peagle, 7 for eagle3")
    law.add_argument(
        "--rate", type=float, default=0.8, help="peagle: share kept from depth to depth"
    )
    law.add_argument("--min-rate", type=float, default=0.2, help="peagle: share kept at any depth")
    law.add_argument(
        "--step-decay", type=float, default=0.8, help="eagle3: weight of the next step"
    )
    law.add_argument(
        "--depth-weight", type=float, default=1.0, help="peagle: weight of the next depth"
    )
    law.add_argument(
        "--loss",
        choices=("kl", "tv", "lk", "ce"),
        default="kl",
        help="divergence from the target: KL, total variation, or KL that turns into it; "
        "ce: cross entropy of the text's tokens",
    )
    law.add_argument(
        "--sharpen", type=float, default=1.0, help="temperature of the target's distribution"
    )
    law.add_argument(
        "--elements",
        choices=("anchors", "texts"),
        help="peagle: what is dropped from depth to depth (default: texts, which are faster; anchors with "
        "--segments or --query-chunk)",
    )
    law.add_argument(
        "--weights",
        choices=("depth", "dpace"),
        help="peagle by texts: dpace weighs drafts by how likely those before them are right (default there)",
    )
    law.add_argument(
        "--repeat-weight",
        type=float,
        default=0.2,
        help="of anchors whose last 8 tokens occurred before in the text",
    )
    law.add_argument(
        "--anchors",
        type=int,
        help="anchors of each text that are trained, fresh ones first (default: all); faster steps",
    )
    law.add_argument(
        "--max-temperature",
        type=float,
        help="train on texts sampled at or below it; 0: greedy ones (default: all)",
    )
    law.add_argument(
        "--text-length",
        type=int,
        metavar="N",
        help="train on pieces of N tokens of the texts; steps have as many tokens, the evaluation whole texts",
    )
    law.add_argument(
        "--long-text",
        type=Path,
        help="folder of longer texts, for every N-th step; these steps have as many tokens as the others",
    )
    law.add_argument("--long-every", type=int, default=4, metavar="N", help="(default %(default)s)")
    law.add_argument("--batch", type=int, default=64, help="texts per step")
    law.add_argument("--query-chunk", type=int, help="queries attended at once: less memory")
    law.add_argument(
        "--segments", type=int, default=1, help="peagle: pieces of each text: less memory"
    )
    law.add_argument("--eval-sequences", type=int, default=512)
    law.add_argument("--num-draft", type=int, default=7, help="drafts per round in the evaluation")


def _add_share(parser) -> None:
    parser.add_argument(
        "--share", nargs="+", choices=("embedding", "unembedding"), default=[],
        help="tables of the target that the head reads and does not train: a smaller head (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="draft only the N most frequent tokens of the texts: faster rounds (default: all)",
    )  # fmt: skip


def _add_drafter(commands):
    parser = commands.add_parser("drafter", help="train a draft head on the target's text")
    parser.add_argument("--method", choices=("peagle", "eagle3"), required=True)
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument(
        "--text", type=Path, required=True, help="folder written by `continuations`"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--init", type=Path, help="head folder to start from; its shape is kept, its MLPs may grow"
    )
    shape = parser.add_argument_group("head (default: the target's shape)")
    shape.add_argument("--layers", type=int, help="default 4 for peagle, 1 for eagle3")
    shape.add_argument("--intermediate-size", type=int)
    shape.add_argument(
        "--taps",
        type=int,
        nargs="+",
        help="layer ids with spaces between them, as 1 4 7; default 2, L/2, L-3",
    )
    shape.add_argument(
        "--from-layers",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="layers after the first start as the target's last ones (default: where these are dense, plain "
        "weights of the head's sizes)",
    )
    shape.add_argument(
        "--mask-token-id", type=int, help="peagle; default: a reserved token of the target"
    )
    _add_share(shape)
    shape.add_argument(
        "--hidden",
        choices=("shared", "depth", "token", "both", "mix"),
        default="shared",
        help="peagle by texts: states of the mask rows; other forms than shared are for comparison and are "
        "not written to OUT/final",
    )
    _add_law(parser)
    _add_run_options(
        parser, learning_rate=3e-3, adam_learning_rate=2e-3, microbatches=1, log_every=50
    )
    _add_compute_options(parser, loss_chunk=16384)


def _add_selector(commands):
    parser = commands.add_parser("selector", help="add a selector to a trained P-EAGLE head")
    parser.add_argument("--head", type=Path, required=True, help="P-EAGLE head folder")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument(
        "--text", type=Path, required=True, help="folder written by `continuations`"
    )
    parser.add_argument("--out", type=Path, required=True)
    group = parser.add_argument_group("what is trained")
    group.add_argument("--rank", type=int, default=256, help="inner width")
    group.add_argument("--depths", type=int, help="default: those of the head's training")
    group.add_argument(
        "--repeat-weight", type=float, default=0.2,
        help="of anchors whose last 8 tokens occurred before in the text",
    )  # fmt: skip
    group.add_argument(
        "--max-temperature", type=float,
        help="train on texts sampled at or below it; 0: greedy ones (default: all)",
    )  # fmt: skip
    group.add_argument("--batch", type=int, default=64, help="texts per step")
    group.add_argument("--eval-sequences", type=int, default=512)
    group.add_argument(
        "--num-draft", type=int, default=7, help="drafts per round in the evaluation"
    )
    _add_run_options(
        parser, learning_rate=1.5e-3, adam_learning_rate=1.5e-3, microbatches=1, log_every=50
    )
    parser.set_defaults(optimizer="adamw", weight_decay=0.01)
    _add_compute_options(parser, loss_chunk=16384)


def _add_engine_options(parser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--concurrency", type=int, help="texts at once (default: 256, on a CPU 8)")
    group.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto",
        help="auto: bfloat16 on GPUs and TPUs, float32 on CPUs",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0)


def _add_synthesize(commands):
    parser = commands.add_parser("synthesize", help="let a chat model ask itself questions")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of prompts.jsonl")
    parser.add_argument("--num", type=int, default=20_000, help="questions sampled")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a question")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--exclude", type=Path, nargs="+", default=[], metavar="FILE.jsonl",
        help="evaluation prompts: questions that share ten words in a row with them are left out",
    )  # fmt: skip
    _add_engine_options(parser)


def _add_head_shape(parser) -> None:
    parser.add_argument("--method", choices=("peagle", "eagle3"), default="peagle")
    parser.add_argument("--layers", type=int, help="default 4 for peagle, 1 for eagle3")
    _add_share(parser)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a training row")
    parser.add_argument("--step-tokens", type=int, default=16_384, help="tokens of a step")
    parser.add_argument("--epochs", type=float, default=6.0, help="passes over the texts")


def _add_head(commands):
    parser = commands.add_parser(
        "head", help="a head for your model: answers to prompts, then the recommended training"
    )
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, metavar="FILE",
        help="JSON lines of prompts or chats ({messages: [...]}), text files, or folders of text",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    _add_head_shape(parser)
    parser.add_argument(
        "--minutes", type=float, help="of training, instead of --epochs; answers take their time"
    )
    parser.add_argument(
        "--answers-only", action="store_true", help="stop before the training, after the plan"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0, 0, 0, 0.7, 0, 0, 0, 1],
        help="of the answers, in turn (default: three quarters greedy)",
    )  # fmt: skip
    parser.add_argument("--num-heldout", type=int, default=128, help="prompts of the evaluation")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=None,
        help="send prompts through the chat template (default: if the target has one)",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of prompts cut from text")
    parser.add_argument(
        "--selector", action=argparse.BooleanOptionalAction, default=True,
        help="peagle: train a selector too, in a fifth of the time (default)",
    )  # fmt: skip
    parser.add_argument("--mask-token-id", type=int, help="default: a reserved token of the target")
    parser.add_argument(
        "--speculators", action="store_true",
        help="also write the head in the layout of speculators, without its selector: OUT/speculators",
    )  # fmt: skip
    _add_engine_options(parser)


def _add_plan(commands):
    parser = commands.add_parser("plan", help="memory and time of a training; loads no weights")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", type=Path, help="model folder")
    target.add_argument("--preset", metavar="NAME", help="released sizes, as gpt-oss-20b")
    parser.add_argument("--bits", type=float, default=16, help="of a preset's weight: 16, 8, 4.25")
    parser.add_argument("--texts", type=int, default=10_000, help="training rows")
    parser.add_argument("--tflops", type=float, help="of the device; default: measured here")
    _add_head_shape(parser)


def parser() -> argparse.ArgumentParser:
    """The argument parser; the attribute `stage` of its result names the stage."""
    command_line = Parser(
        prog="peagle-train",
        description="Trains a small target model and draft heads for it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(
        required=True, metavar="stage", dest="stage",
        parser_class=partial(Parser, formatter_class=DefaultsFormatter),
    )  # fmt: skip
    stages = (
        _add_head, _add_synthesize, _add_plan,
        _add_data, _add_target, _add_continuations, _add_drafter, _add_selector,
    )  # fmt: skip
    for add in stages:
        add(commands)
    return command_line


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_number(name: str, value: float) -> None:
    least = 0 if name in _ZERO_IS_FINE else 1 if isinstance(value, int) else None
    if name in _SHARES:
        if not 0 <= value <= 1:
            raise ConfigError(f"{_flag(name)} {value} must be between 0 and 1")
    elif least is None and not 0 < value < math.inf:
        raise ConfigError(f"{_flag(name)} {value} must be a number above 0")
    elif least is not None and not least <= value < math.inf:
        raise ConfigError(f"{_flag(name)} {value} must be at least {least}")


def _check_folders(args) -> None:
    given = [(f"{_flag(name)} ", getattr(args, name, None)) for name in _FOLDERS]
    for flag, folder in [*given, *(("", folder) for folder in getattr(args, "folders", ()))]:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{flag}{folder}: no such folder")
    for name, (file, stage) in _FILES.items():
        folder = getattr(args, name, None)
        if folder is not None and not (folder / file).is_file():
            raise ConfigError(
                f"{_flag(name)} {folder}: no {file}; give a folder that `{stage}` wrote"
            )
    for name in _PATHS:
        for path in getattr(args, name, ()):
            if not path.exists():
                raise ConfigError(f"{_flag(name)} {path}: no such file")
    out = getattr(args, "out", None)
    for path in () if out is None else (out, *out.parents):
        if path.is_file():
            raise ConfigError(f"--out {path}: is a file; give a folder")


def check(args) -> None:
    """Validates the options before jax is imported.

    Raises:
      ConfigError: a number out of range, or a folder that is not there or lacks what its stage writes.
    """
    for name, value in vars(args).items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and not isinstance(one, bool):
                _check_number(name, one)
    if hasattr(args, "min_prompt") and args.min_prompt > args.max_prompt:
        raise ConfigError(f"--min-prompt {args.min_prompt} is above --max-prompt {args.max_prompt}")
    if hasattr(args, "microbatches") and args.batch % args.microbatches:
        raise ConfigError(f"--batch {args.batch} is no multiple of --microbatches")
    _check_folders(args)
