"""`peagle-train`: source text -> target -> continuations -> draft heads, one subcommand a stage."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from peagle_jax.checkpoint import CheckpointError
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.rope_config import RopeConfig

_EPILOG = """\
the whole recipe:
  peagle-train data --out run/data /usr/lib/python3.12 .venv/lib/python3.12/site-packages
  peagle-train target --data run/data --out run/target --minutes 5
  peagle-train continuations --data run/data --target run/target/final --out run/text
  peagle-train drafter --method peagle --target run/target/final --text run/text --out run/peagle --minutes 4
  peagle-train drafter --method eagle3 --target run/target/final --text run/text --out run/eagle3 --minutes 2

Every stage writes only under --out and goes on where it stopped when it is started again. Trained
models lie in OUT/final in the Hugging Face layout, beside train.csv, eval.csv and curves.png.
"""


def _add_run_options(parser, *, learning_rate, adam_learning_rate, microbatches, log_every):
    group = parser.add_argument_group("training run")
    budget = group.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps")
    budget.add_argument(
        "--minutes",
        type=float,
        help="time budget; steps are set once from the speed of the first ones",
    )
    group.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    group.add_argument(
        "--learning-rate", type=float, default=learning_rate, help="peak (default %(default)s)"
    )
    group.add_argument(
        "--adam-learning-rate",
        type=float,
        default=adam_learning_rate,
        help="peak for embeddings, unembedding and vectors when --optimizer muon (default %(default)s)",
    )
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    group.add_argument("--decay", type=float, default=0.4, help="share of the run that cools down")
    group.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    group.add_argument(
        "--microbatches",
        type=int,
        default=microbatches,
        help="pieces of a batch, gradients accumulated: less memory (default %(default)s)",
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
        help="causal attention; auto is cuDNN's for bfloat16 on a GPU",
    )
    group.add_argument(
        "--loss-chunk",
        type=int,
        default=loss_chunk,
        help="rows whose logits exist at a time (default %(default)s)",
    )


def _pick(args, names: str) -> dict:
    return {name: getattr(args, name) for name in names.split()}


def _run_config(args):
    from peagle_jax.training.trainer import RunConfig

    names = (
        "out steps minutes optimizer learning_rate adam_learning_rate weight_decay warmup decay clip "
        "microbatches seed log_every eval_every save_every"
    )
    if args.batch % args.microbatches:
        raise ConfigError(f"--batch {args.batch} is no multiple of --microbatches")
    return RunConfig(**_pick(args, names))


def _add_data(commands):
    parser = commands.add_parser("data", help="source files -> tokenizer and token streams")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of Python source")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sample-mb", type=float, default=40, help="text the BPE is trained on")
    parser.add_argument("--max-mb", type=float, default=500, help="text encoded at most")
    parser.add_argument("--num-headers", type=int, default=60_000, help="function heads kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_data)


def _data(args) -> None:
    from peagle_jax.training.data import DataOptions, prepare

    if (args.out / "sources.json").exists():
        print(f"{args.out} is complete; remove it to start over")
        return
    options = DataOptions(
        folders=tuple(args.folders),
        sample_bytes=int(args.sample_mb * 1e6),
        max_bytes=int(args.max_mb * 1e6),
        **_pick(args, "vocab_size num_headers seed"),
    )
    report = prepare(options, args.out)
    for name, package in report["packages"].items():
        verdict = "kept" if package["kept"] else "dropped"
        print(f"{verdict:8}{package['bytes'] / 1e6:8.2f} MB  {name}  ({package['licence']})")
    print(json.dumps({k: v for k, v in report.items() if k != "packages"}))


def _add_target(commands):
    parser = commands.add_parser("target", help="train the target model on token streams")
    parser.add_argument("--data", type=Path, required=True, help="folder written by `data`")
    parser.add_argument("--out", type=Path, required=True)
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
    parser.set_defaults(run=_target)


def _target(args) -> None:
    from tokenizers import Tokenizer

    from peagle_jax.checkpoint import save_target
    from peagle_jax.training import target
    from peagle_jax.training.data import END_ID
    from peagle_jax.training.trainer import fit, write_provenance

    vocab = Tokenizer.from_file(str(args.data / "tokenizer.json")).get_vocab_size()
    config = TargetConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate_size,
        norm_eps=1e-6,
        rope=RopeConfig(theta=args.rope_theta),
        max_position=args.max_position,
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        eos_ids=(END_ID,),
    )
    run = _run_config(args)
    names = "data sequence batch dtype attention loss_chunk eval_sequences"
    options = target.TargetOptions(**_pick(args, names))
    task, merge = target.make_task(config, options, run)
    write_provenance(args.out, dict(model=asdict(config), run=asdict(run), options=asdict(options)))
    _report_size(task)
    params = fit(task, run)
    _report_memory()
    save_target(merge(params), args.out / "final")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.data / name, args.out / "final" / name)
    print(f"model in {args.out / 'final'}")


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
    parser.set_defaults(run=_continuations)


def _continuations(args) -> None:
    from peagle_jax.checkpoint import load_target
    from peagle_jax.training import continuations
    from peagle_jax.training.trainer import write_provenance

    names = "data num num_heldout length batch min_prompt max_prompt header_share seed"
    options = continuations.ContinuationOptions(
        temperatures=tuple(args.temperatures), **_pick(args, names)
    )
    target = load_target(args.target, dtype=args.dtype)
    write_provenance(args.out, dict(options=asdict(options)))
    for name, path in continuations.generate(target, options, args.out).items():
        print(f"{name}: {path}")


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
    shape.add_argument("--taps", type=int, nargs="+", help="layer ids; default 2, L/2, L-3")
    shape.add_argument("--mask-token-id", type=int, help="peagle; default that of `data`")
    shape.add_argument(
        "--freeze-lm-head", action="store_true", help="keep the target's unembedding"
    )
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
        choices=("kl", "tv", "lk"),
        default="kl",
        help="divergence from the target: KL, total variation, or KL that turns into it",
    )
    law.add_argument(
        "--sharpen", type=float, default=1.0, help="temperature of the target's distribution"
    )
    law.add_argument("--batch", type=int, default=64, help="texts per step")
    law.add_argument("--query-chunk", type=int, help="queries attended at once: less memory")
    law.add_argument(
        "--segments", type=int, default=1, help="peagle: pieces of each text: less memory"
    )
    law.add_argument("--eval-sequences", type=int, default=512)
    law.add_argument("--num-draft", type=int, default=7, help="drafts per round in the evaluation")
    _add_run_options(
        parser, learning_rate=3e-3, adam_learning_rate=2e-3, microbatches=1, log_every=50
    )
    _add_compute_options(parser, loss_chunk=16384)
    parser.set_defaults(run=_drafter)


def _head_config(args, target: TargetConfig) -> DrafterConfig:
    from peagle_jax.training.data import MASK_ID

    peagle = args.method == "peagle"
    taps = tuple(args.taps) if args.taps else None
    depths = args.depths or (8 if peagle else 7)
    mask = MASK_ID if args.mask_token_id is None else args.mask_token_id
    return DrafterConfig(
        method=args.method,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=args.layers or (4 if peagle else 1),
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=args.intermediate_size or target.intermediate_size,
        norm_eps=target.norm_eps,
        rope=target.rope,
        num_taps=len(taps or target.default_taps),
        taps=taps,
        mask_token_id=mask if peagle else None,
        own_embedding=peagle,
        own_lm_head=True,
        trained_num_draft=depths,
    )


def _grown_config(args, fresh: DrafterConfig, init: DrafterConfig) -> DrafterConfig:
    """The shape of the head to start from, with what the command line may change."""
    asked = dict(method=args.method, num_layers=args.layers, mask_token_id=args.mask_token_id)
    asked["taps"] = args.taps and fresh.taps
    for name, value in asked.items():
        if value is not None and value != getattr(init, name):
            raise ConfigError(f"--init has {name} {getattr(init, name)}, not {value}")
    return replace(
        init,
        intermediate_size=args.intermediate_size or init.intermediate_size,
        trained_num_draft=args.depths or init.trained_num_draft or fresh.trained_num_draft,
    )


def _drafter(args) -> None:
    from peagle_jax.checkpoint import load_head, load_target, save_head
    from peagle_jax.training import drafter
    from peagle_jax.training.trainer import fit, write_provenance

    target = load_target(args.target, dtype=args.dtype)
    config, init = _head_config(args, target.config), None
    if args.init is not None:
        init = load_head(args.init, target.config, dtype="float32")
        config = _grown_config(args, config, init.config)
    run = _run_config(args)
    names = (
        "batch rate min_rate freeze_lm_head dtype attention query_chunk loss_chunk eval_sequences "
        "num_draft loss sharpen segments"
    )
    options = drafter.DrafterOptions(
        continuations=args.text,
        num_depths=config.trained_num_draft,
        step_decay=args.depth_weight if args.method == "peagle" else args.step_decay,
        **_pick(args, names),
    )
    task, merge = drafter.make_task(config, target, options, run, init)
    write_provenance(args.out, dict(head=asdict(config), run=asdict(run), options=asdict(options)))
    _report_size(task)
    params = fit(task, run)
    _report_memory()
    save_head(merge(params), args.out / "final", max_position=target.config.max_position)
    print(f"head in {args.out / 'final'}")


def _report_memory() -> None:
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"peak device memory {stats['peak_bytes_in_use'] / 2**30:.1f} GiB", flush=True)


def _report_size(task) -> None:
    million = sum(p.size for p in task.params.values()) / 1e6
    print(f"{million:.2f} M trained parameters, {task.tokens_per_step} tokens a step", flush=True)


def main() -> None:
    """Entry point of `peagle-train`."""
    parser = argparse.ArgumentParser(
        prog="peagle-train",
        description="Trains a small target model and draft heads for it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="stage")
    for add in (_add_data, _add_target, _add_continuations, _add_drafter):
        add(commands)
    args = parser.parse_args()
    try:
        args.run(args)
    except (ConfigError, CheckpointError, FileNotFoundError, FloatingPointError) as error:
        print(f"peagle-train: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
