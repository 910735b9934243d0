"""`python -m lab.embedded`: source text -> tokenizer and prompts -> target; lab/training.md."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from peagle_jax.checkpoint import load_target, save_target
from peagle_jax.cli.command_line import DefaultsFormatter, Parser
from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.rope_config import RopeConfig
from peagle_jax.training.trainer import RunConfig, fit, write_provenance


def _add_data(commands) -> None:
    parser = commands.add_parser("data", help="source files -> tokenizer, token streams, prompts")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of Python source")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sample-mb", type=float, default=40, help="text the BPE is trained on")
    parser.add_argument("--max-mb", type=float, default=500, help="text encoded at most")
    parser.add_argument("--num-prompts", type=int, default=30_000)
    parser.add_argument("--function-copies", type=int, default=2, help="of each function")
    parser.add_argument("--exercises", type=int, default=50_000, help="generated functions")
    parser.add_argument("--cut-every", type=int, default=800, help="characters; 0: no cuts")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_data)


def _data(args) -> None:
    from lab.embedded.data import DataOptions, prepare

    if (args.out / "sources.json").exists():
        print(f"{args.out} is complete; remove it to start over")
        return
    names = ("vocab_size", "num_prompts", "function_copies", "exercises", "cut_every", "seed")
    options = DataOptions(
        folders=tuple(args.folders),
        sample_bytes=int(args.sample_mb * 1e6),
        max_bytes=int(args.max_mb * 1e6),
        **{name: getattr(args, name) for name in names},
    )
    report = prepare(options, args.out)
    for name, package in report.pop("packages").items():
        verdict = "kept" if package["kept"] else "dropped"
        print(f"{verdict:8}{package['bytes'] / 1e6:8.2f} MB  {name}  ({package['licence']})")
    print(json.dumps(report))


def _add_chats(commands) -> None:
    parser = commands.add_parser("chats", help="function heads -> chats about code, as prompts")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of Python source")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--num", type=int, default=7000, help="at most; half are exercises")
    parser.add_argument("--exclude", type=Path, nargs="+", default=[], help="evaluation prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_chats)


def _chats(args) -> None:
    from lab.embedded.chats import chats

    rows = list(chats(args.folders, args.num, tuple(args.exclude), args.seed))
    args.out.write_text("".join(row + "\n" for row in rows))
    print(f"{len(rows)} chats in {args.out}")


def _add_target(commands) -> None:
    parser = commands.add_parser("target", help="train the target on token streams")
    parser.add_argument("--data", type=Path, required=True, help="folder written by `data`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="target to train further, in its shape")
    parser.add_argument(
        "--text",
        type=Path,
        help="RUN/text of `peagle-train head --answers-only --temperatures 0 --out RUN`: greedy "
        "texts whose repeated 8-grams become unlikely",
    )
    parser.add_argument("--text-batch", type=int, default=64, help="texts per step")
    parser.add_argument("--penalty", type=float, default=2.0, help="weight of a repeated token")
    for name, default in (
        ("hidden-size", 256),
        ("layers", 12),
        ("heads", 4),
        ("kv-heads", 2),
        ("head-dim", 64),
        ("intermediate-size", 768),
        ("max-position", 2048),
        ("sequence", 1024),
        ("batch", 256),
        ("microbatches", 2),
        ("seed", 0),
        ("warmup", 100),
        ("every", 500),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="optimiser steps")
    length.add_argument("--minutes", type=float)
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the run that cools down")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.set_defaults(run=_target)


def _target(args) -> None:
    from lab.embedded import target

    if args.init is None:
        init, config = None, _config(args)
    else:
        init = load_target(args.init, dtype="float32")
        config = init.config
    run = RunConfig(
        out=args.out,
        steps=args.steps,
        minutes=args.minutes,
        optimizer="muon",
        learning_rate=args.learning_rate,
        adam_learning_rate=0.75 * args.learning_rate,
        weight_decay=0.1,
        warmup=args.warmup,
        decay=args.decay,
        clip=1.0,
        microbatches=args.microbatches,
        seed=args.seed,
        log_every=min(50, args.every),
        eval_every=args.every,
        save_every=args.every,
    )
    options = target.TargetOptions(
        data=args.data,
        sequence=args.sequence,
        batch=args.batch,
        dtype=args.dtype,
        text=args.text,
        text_batch=args.text_batch,
        penalty=args.penalty,
    )
    task, merge = target.make_task(config, options, run, init)
    write_provenance(args.out, dict(model=asdict(config), run=asdict(run), options=asdict(options)))
    save_target(merge(fit(task, run)), args.out / "final")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.data / name, args.out / "final" / name)
    print(f"model in {args.out / 'final'}")


def _config(args) -> TargetConfig:
    """A small Qwen3 with the vocabulary of `data`."""
    from tokenizers import Tokenizer

    from lab.embedded.data import END_ID

    tokenizer = args.data / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(f"--data {args.data}: no tokenizer.json; give a folder that `data` wrote")
    return TargetConfig(
        family="qwen3",
        vocab_size=Tokenizer.from_file(str(tokenizer)).get_vocab_size(),
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate_size,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0),
        max_position=args.max_position,
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        eos_ids=(END_ID,),
    )


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m lab.embedded", description=__doc__)
    commands = parser.add_subparsers(
        required=True, metavar="stage", parser_class=_with_defaults, dest="stage"
    )
    _add_data(commands)
    _add_chats(commands)
    _add_target(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ConfigError, OSError, FloatingPointError) as error:
        print(f"lab.embedded: error: {error}", file=sys.stderr)
        return 2
    return 0


def _with_defaults(**fields) -> argparse.ArgumentParser:
    return Parser(formatter_class=DefaultsFormatter, **fields)


if __name__ == "__main__":
    sys.exit(main())
