"""`peagle-train`: source text -> target -> continuations -> draft heads, one subcommand a stage."""

import json
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.rope_config import RopeConfig
from peagle_jax.training.options import check, parser


def _pick(args, names: str) -> dict:
    return {name: getattr(args, name) for name in names.split()}


def _run_config(args):
    from peagle_jax.training.trainer import RunConfig

    names = (
        "out steps minutes optimizer learning_rate adam_learning_rate weight_decay warmup decay clip "
        "microbatches seed log_every eval_every save_every"
    )
    return RunConfig(**_pick(args, names))


def _data(args) -> None:
    from peagle_jax.training.data import DataOptions, prepare

    if (args.out / "sources.json").exists():
        print(f"{args.out} is complete; remove it to start over")
        return
    options = DataOptions(
        folders=tuple(args.folders),
        sample_bytes=int(args.sample_mb * 1e6),
        max_bytes=int(args.max_mb * 1e6),
        **_pick(args, "vocab_size num_headers function_copies exercises cut_every seed tokenizer"),
    )
    report = prepare(options, args.out)
    for name, package in report["packages"].items():
        verdict = "kept" if package["kept"] else "dropped"
        print(f"{verdict:8}{package['bytes'] / 1e6:8.2f} MB  {name}  ({package['licence']})")
    print(json.dumps({k: v for k, v in report.items() if k != "packages"}))


def _target(args) -> None:
    from tokenizers import Tokenizer

    from peagle_jax.checkpoint import load_target, save_target
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
    init = None
    if args.init is not None:
        init = load_target(args.init, dtype="float32")
        _check_shape(init.config, config)
    run = _run_config(args)
    names = "data sequence batch dtype attention loss_chunk eval_sequences text text_batch penalty"
    options = target.TargetOptions(**_pick(args, names))
    task, merge = target.make_task(config, options, run, init)
    write_provenance(args.out, dict(model=asdict(config), run=asdict(run), options=asdict(options)))
    _report_size(task)
    params = fit(task, run)
    _report_memory()
    save_target(merge(params), args.out / "final")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.data / name, args.out / "final" / name)
    print(f"model in {args.out / 'final'}")


def _check_shape(found: TargetConfig, asked: TargetConfig) -> None:
    """Refuses a target to start from whose weights have other shapes than those that are asked for."""
    names = [
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "qk_norm",
    ]
    other = [f"{n} {getattr(found, n)}" for n in names if getattr(found, n) != getattr(asked, n)]
    if other:
        raise ConfigError(f"--init has {', '.join(other)}: give the same shape and tokenizer")


def _continuations(args) -> None:
    from peagle_jax.checkpoint import load_target
    from peagle_jax.training import continuations
    from peagle_jax.training.trainer import write_provenance

    names = "data num num_heldout length batch min_prompt max_prompt header_share seed"
    options = continuations.ContinuationOptions(
        temperatures=tuple(args.temperatures), **_pick(args, names)
    )
    target = load_target(args.target, dtype=args.dtype)
    continuations.check_length(options, target.config)
    write_provenance(args.out, dict(options=asdict(options)))
    for name, path in continuations.generate(target, options, args.out).items():
        print(f"{name}: {path}")


def _teacher(args):
    """The target as an engine runs it."""
    from peagle_jax.cli.loading import load_weights

    return load_weights(args.target, None, method="none", dtype=args.dtype)[0]


def _mask_token(args, target: TargetConfig) -> int:
    from peagle_jax.training.mask_token import mask_token
    from peagle_jax.training.stored_text import load_text

    texts = [load_text(target, args.text, name).tokens for name in ("train", "heldout")]
    return mask_token(args.mask_token_id, args.target, target, texts)


def head_config(
    target: TargetConfig,
    *,
    method: str,
    layers: int | None = None,
    depths: int | None = None,
    taps: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    mask_token_id: int | None = None,
    qk_norm: bool = False,
    share: Collection[str] = (),
    draft_vocab: int | None = None,
) -> DrafterConfig:
    """A new head in the target's shape, by default with the layers and depths of the released ones.

    Args:
      draft_vocab: number of tokens that are drafted; None: all.
      share: "embedding" and "unembedding": tables of the target that the head reads in place of its own.
    """
    peagle = method == "peagle"
    if draft_vocab is not None and (draft_vocab > target.vocab_size or "unembedding" in share):
        raise ConfigError(
            f"--draft-vocab {draft_vocab}: the target has {target.vocab_size} tokens, and a shared unembedding has all"
        )
    return DrafterConfig(
        method=method,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab or target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=layers or (4 if peagle else 1),
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=intermediate_size or target.mlp_size(target.num_layers - 1),
        norm_eps=target.norm_eps,
        rope=target.rope,
        num_taps=len(taps or target.default_taps),
        taps=taps,
        mask_token_id=mask_token_id if peagle else None,
        own_embedding=peagle and "embedding" not in share,
        own_lm_head="unembedding" not in share,
        trained_num_draft=depths or (8 if peagle else 7),
        qk_norm=qk_norm,
    )


def _grown_config(args, fresh: DrafterConfig, init: DrafterConfig) -> DrafterConfig:
    """The config of the head to start from, with the changes that the command line allows."""
    asked = dict(method=args.method, num_layers=args.layers, mask_token_id=args.mask_token_id)
    asked["taps"] = args.taps and fresh.taps
    if args.from_layers:
        raise ConfigError("--from-layers is for new heads, and --init starts from a trained one")
    if args.hidden != "shared":
        raise ConfigError("--hidden is for new heads, and --init starts from a trained one")
    for name, value in asked.items():
        if value is not None and value != getattr(init, name):
            raise ConfigError(f"--init has {name} {getattr(init, name)}, not {value}")
    return replace(
        init,
        intermediate_size=args.intermediate_size or init.intermediate_size,
        trained_num_draft=args.depths or init.trained_num_draft or fresh.trained_num_draft,
    )


@dataclass(frozen=True)
class DrafterRun:
    """A run of `peagle-train drafter`, built from its options."""

    task: Any  # trainer.Task
    merge: Callable  # parameters -> head
    run: Any  # trainer.RunConfig
    target: TargetConfig
    configs: dict[str, Any]  # for `write_provenance`


def drafter_run(args) -> DrafterRun:
    """Loads the target and the texts, and makes the head.

    Raises:
      ConfigError: invalid or contradictory options or data.
    """
    from peagle_jax.checkpoint import load_head
    from peagle_jax.training import drafter

    target = _teacher(args)
    peagle, init = args.method == "peagle", None
    config = head_config(
        target.config,
        method=args.method,
        taps=tuple(args.taps) if args.taps else None,
        mask_token_id=_mask_token(args, target.config) if peagle and args.init is None else 0,
        **_pick(args, "layers depths intermediate_size share draft_vocab"),
    )
    from_layers = args.from_layers
    if from_layers is None:
        from_layers = args.init is None and drafter.can_copy_layers(config, target)
    if from_layers:
        config = replace(config, qk_norm=target.config.qk_norm)
    if args.init is not None:
        init = load_head(args.init, target.config, dtype="float32")
        config = _grown_config(args, config, init.config)
    run = _run_config(args)
    names = (
        "batch rate min_rate dtype attention query_chunk loss_chunk eval_sequences "
        "num_draft loss sharpen segments repeat_weight anchors max_temperature "
        "long_text long_every hidden text_length"
    )
    by_anchors = not peagle or args.segments > 1 or args.query_chunk
    elements = args.elements or ("anchors" if by_anchors else "texts")
    options = drafter.DrafterOptions(
        continuations=args.text,
        num_depths=config.trained_num_draft,
        step_decay=args.depth_weight if peagle else args.step_decay,
        elements=elements,
        weights=args.weights or ("dpace" if elements == "texts" else "depth"),
        from_layers=from_layers,
        **_pick(args, names),
    )
    task, merge = drafter.make_task(config, target, options, run, init)
    configs = dict(head=asdict(config), run=asdict(run), options=asdict(options))
    return DrafterRun(task, merge, run, target.config, configs)


def _drafter(args):
    """The trained head, in float32. OUT/final has it too, unless `--hidden` is one that files do not hold."""
    from peagle_jax.checkpoint import save_head
    from peagle_jax.training.trainer import fit, write_provenance

    run = drafter_run(args)
    write_provenance(args.out, run.configs)
    _report_size(run.task)
    if args.hidden != "shared":
        print(f"--hidden {args.hidden} is for comparison: no head is written", flush=True)
    head = run.merge(fit(run.task, run.run))
    _report_memory()
    if args.hidden == "shared":
        save_head(head, args.out / "final", max_position=run.target.max_position)
        print(f"head in {args.out / 'final'}")
    else:
        print(f"acceptance in {args.out / 'eval.csv'}")
    return head


def _selector(args) -> None:
    from peagle_jax.checkpoint import load_head, save_head
    from peagle_jax.training import selector
    from peagle_jax.training.trainer import fit, write_provenance

    target = _teacher(args)
    head = load_head(args.head, target.config, dtype=args.dtype)
    run = _run_config(args)
    names = "rank batch dtype attention loss_chunk eval_sequences num_draft repeat_weight max_temperature"
    options = selector.SelectorOptions(
        continuations=args.text,
        num_depths=args.depths or head.config.trained_num_draft or 8,
        **_pick(args, names),
    )
    task, merge = selector.make_task(head, target, options, run)
    kept = dict(head=asdict(head.config), run=asdict(run), options=asdict(options))
    write_provenance(args.out, kept)
    _report_size(task)
    params = fit(task, run)
    _report_memory()
    save_head(merge(params), args.out / "final", max_position=target.config.max_position)
    print(f"head with a selector in {args.out / 'final'}")


def _engine_sizes(args) -> dict:
    """dtype and concurrency of the engine; with the defaults those of the device."""
    import jax

    from peagle_jax.cli.runs import choose_dtype

    on_cpu = jax.devices()[0].platform == "cpu"
    return dict(
        dtype=choose_dtype(args.dtype), concurrency=args.concurrency or (8 if on_cpu else 256)
    )


def _synthesize(args) -> None:
    from peagle_jax.training import answers, synthesis

    sizes = _engine_sizes(args)
    options = synthesis.SynthesisOptions(
        exclude=tuple(args.exclude), concurrency=sizes["concurrency"],
        **_pick(args, "num max_tokens temperature seed"),
    )  # fmt: skip
    engine = answers.engine_of(args.target, length=2 * args.max_tokens, **sizes)
    count = synthesis.synthesize(engine, options, args.out)
    print(f"{count} questions in {args.out / 'prompts.jsonl'}")


def _plan(args) -> None:
    from peagle_jax.checkpoint.target_json import target_config
    from peagle_jax.models.presets import PRESETS
    from peagle_jax.training import recipe

    if args.preset not in (None, *PRESETS):
        raise ConfigError(f"--preset {args.preset}: known are {', '.join(PRESETS)}")
    config = PRESETS[args.preset] if args.target is None else target_config(args.target)
    held = int(args.bits / 8 * recipe.target_weights(config))
    if args.target is not None:
        held = sum(file.stat().st_size for file in args.target.glob("*.safetensors")) or held
    print(_plan_of(args, config, held, rows=args.texts, heldout=args.texts).report(args.tflops))


def _plan_of(args, config: TargetConfig, held: int, *, rows: int, heldout: int):
    from peagle_jax.training import recipe

    sizes = dict(length=args.length, step_tokens=args.step_tokens, epochs=args.epochs)
    shape = recipe.shape_of(config, rows=rows, heldout=heldout, **sizes)
    names = "method layers share draft_vocab"
    head = head_config(config, mask_token_id=0, **_pick(args, names))
    return recipe.Plan(target=config, head=head, shape=shape, target_bytes=held)


def _head(args) -> None:
    from peagle_jax.checkpoint import load_head, save_speculators_head, target_config
    from peagle_jax.training import answers, recipe
    from peagle_jax.training.stored_text import load_text

    config, text = target_config(args.target), args.out / "text"
    sizes = _engine_sizes(args)
    options = answers.AnswerOptions(
        prompts=tuple(args.prompts),
        temperatures=tuple(args.temperatures),
        concurrency=sizes["concurrency"],
        **_pick(args, "chat prompt_tokens length max_tokens num_heldout seed"),
    )
    answers.write(args.target, options, text, dtype=sizes["dtype"])
    rows, heldout = (len(load_text(config, text, name).tokens) for name in ("train", "heldout"))
    held = sum(file.stat().st_size for file in args.target.glob("*.safetensors"))
    plan = _plan_of(args, config, held, rows=rows, heldout=heldout)
    print(plan.report(None), flush=True)
    if args.answers_only:
        return
    made = args.out / "head"
    run(parser().parse_args([*recipe.drafter_line(args, plan, sizes["dtype"]), "--out", str(made)]))
    if args.selector and args.method == "peagle":
        line = recipe.selector_line(args, plan, sizes["dtype"])
        made = args.out / "selector"
        run(parser().parse_args([*line, "--out", str(made)]))
    shutil.copytree(made / "final", args.out / "final", dirs_exist_ok=True)
    folder = args.out / "final"
    if args.speculators:
        head = load_head(folder, config, dtype="bfloat16")
        save_speculators_head(head, args.out / "speculators", config)
    print(f"head in {folder}: peagle-generate --model {args.target} --drafter {folder} --chat ...")


def _report_memory() -> None:
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"peak device memory {stats['peak_bytes_in_use'] / 2**30:.1f} GiB", flush=True)


def _report_size(task) -> None:
    million = sum(p.size for p in task.params.values()) / 1e6
    print(f"{million:.2f} M trained parameters, {task.tokens_per_step} tokens a step", flush=True)


_STAGES = {
    "head": _head,
    "synthesize": _synthesize,
    "plan": _plan,
    "data": _data,
    "target": _target,
    "continuations": _continuations,
    "drafter": _drafter,
    "selector": _selector,
}
_GOES_ON_FROM = {
    "head": "finished part",
    "synthesize": "finished part",
    "target": "checkpoint",
    "continuations": "finished batch",
    "drafter": "checkpoint",
    "selector": "checkpoint",
}
"""What a stage that is started again goes on from; other stages start over."""


def run(args) -> Any:
    """Runs a stage.

    Returns:
      The head that the stage `drafter` trained, a `DraftHead`; None for the other stages.
    Raises:
      ConfigError: invalid or contradictory options or data.
      FloatingPointError: the loss is NaN.
    """
    check(args)
    return _STAGES[args.stage](args)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `peagle-train`; `argv` stands for the command line's arguments.

    Returns:
      0, or 130 after Ctrl-C.
    Raises:
      SystemExit: with code 2, after an error of the user.
    """
    args = parser().parse_args(argv)
    try:
        run(args)
    except (ConfigError, CheckpointError, FileNotFoundError, FloatingPointError) as error:
        print("peagle-train: error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        message = "interrupted"
        if args.stage in _GOES_ON_FROM:
            message += f"; the same command goes on from the last {_GOES_ON_FROM[args.stage]}"
        print(f"\npeagle-train: {message}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
