"""`peagle-train`: a draft head for a model, from prompts."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from peagle_jax.checkpoint.folder_lock import lock_folder
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.cli.command_line import writes_output
from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.extras import check_address_space
from peagle_jax.training.options import REMOVED, check, parser


def _dtype_and_concurrency(args) -> tuple[str, int]:
    """Those of the engine; with the defaults those of the device."""
    import jax

    from peagle_jax.cli.runs import choose_dtype

    on_cpu = jax.devices()[0].platform == "cpu"
    return choose_dtype(args.dtype), args.concurrency or (8 if on_cpu else 256)


def _synthesize(args) -> None:
    from peagle_jax.training import answers, synthesis

    dtype, concurrency = _dtype_and_concurrency(args)
    options = synthesis.SynthesisOptions(
        num=args.num,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        exclude=tuple(args.exclude),
        concurrency=concurrency,
        seed=args.seed,
    )
    synthesis.claim_folder(args.out, options, answers.identity(args.target, dtype))
    engine = answers.engine_of(
        args.target, dtype=dtype, concurrency=concurrency, length=2 * args.max_tokens
    )
    count = synthesis.synthesize(engine, options, args.out)
    print(f"{count} questions in {args.out / 'prompts.jsonl'}")


def _plan(args) -> None:
    from peagle_jax.checkpoint.target_json import target_config
    from peagle_jax.presets import PRESETS
    from peagle_jax.training import recipe

    if args.preset not in (None, *PRESETS):
        raise ConfigError(f"--preset {args.preset}: known are {', '.join(PRESETS)}")
    config = PRESETS[args.preset] if args.target is None else target_config(args.target)
    held = int(args.bits / 8 * recipe.target_weights(config))
    if args.target is not None:
        held = _bytes_of(args.target) or held
    print(_plan_of(args, config, held, rows=args.texts, heldout=args.texts).report(args.tflops))


def _bytes_of(target: Path) -> int:
    return sum(file.stat().st_size for file in target.glob("*.safetensors"))


def _plan_of(args, config: TargetConfig, held: int, *, rows: int, heldout: int, init=None):
    from peagle_jax.training import recipe

    shape = recipe.shape_of(
        config,
        rows=rows,
        heldout=heldout,
        length=args.length,
        step_tokens=args.step_tokens,
        epochs=args.epochs,
        num_devices=args.num_devices,
    )
    if init is None:
        head = recipe.head_config(
            config,
            method=args.method,
            layers=args.layers,
            mask_token_id=0,
            share=args.share,
            draft_vocab=args.draft_vocab,
            length=args.length,
        )
    else:
        head = replace(init, trained_length=args.length)
    return recipe.Plan(target=config, head=head, shape=shape, target_bytes=held)


def _check_devices(wanted: int) -> None:
    import jax

    if wanted > jax.local_device_count():
        kind, there = jax.devices()[0].platform, jax.local_device_count()
        raise ConfigError(f"--num-devices {wanted}: this machine shows {there} of kind {kind}")


def _answer_options(args, concurrency: int):
    from peagle_jax.training.answers import AnswerOptions

    return AnswerOptions(
        prompts=tuple(args.prompts),
        chat=args.chat,
        prompt_tokens=args.prompt_tokens,
        length=args.length,
        max_tokens=args.max_tokens,
        num_heldout=args.num_heldout,
        temperatures=tuple(args.temperatures),
        concurrency=concurrency,
        seed=args.seed,
    )


def _head(args) -> None:
    from peagle_jax.checkpoint import load_head, save_speculators_head, target_config
    from peagle_jax.checkpoint.checked import checked_head
    from peagle_jax.checkpoint.converted import open_checkpoint
    from peagle_jax.cli.loading import load_weights
    from peagle_jax.training import answers, drafter, states
    from peagle_jax.training.stored_text import load_text

    config, folder = target_config(args.target), args.out / "text"
    dtype, concurrency = _dtype_and_concurrency(args)
    _check_devices(args.num_devices)
    init = None
    if args.init is not None:
        shape = checked_head(args.init, open_checkpoint(args.init), config)[0]
        init = drafter.further_config(shape, args.method)
    written = _answer_options(args, concurrency)
    if args.dry_run:
        texts = answers.expected(args.target, written)
        print(f"{texts.prompts} prompts, {texts.answers} answers; {texts.rows} rows at most")
        sizes = dict(rows=texts.rows, heldout=texts.heldout, init=init)
        print(_plan_of(args, config, _bytes_of(args.target), **sizes).report(None))
        return
    answers.write(args.target, written, folder, dtype=dtype)
    texts = [load_text(config, folder, name).tokens for name in ("train", "heldout")]
    rows, heldout = map(len, texts)
    held = _bytes_of(args.target)
    plan = _plan_of(args, config, held, rows=rows, heldout=heldout, init=init)
    print(plan.report(None), flush=True)
    if args.answers_only:
        return
    target = load_weights(args.target, None, method="none", dtype=dtype)[0]
    if args.states_gb is not None:
        taps = plan.head.taps or config.default_taps
        states.write_states(target, taps, folder, most_gb=args.states_gb)
        target = states.without_layers(target, plan.head.num_layers)
    made = _train_head(args, plan, target, texts, dtype)
    if args.selector and args.method == "peagle":
        made = _train_selector(args, plan, target, made, dtype)
    final = args.out / "final"
    shutil.copytree(made, final, dirs_exist_ok=True)
    if args.speculators:
        head = load_head(final, config, dtype="bfloat16")
        save_speculators_head(head, args.out / "speculators", config)
    print(f"head in {final}: peagle-generate --model {args.target} --drafter {final} --chat ...")


def _train_head(args, plan, target, texts, dtype: str) -> Path:
    """Trains a new head, or one further; returns its folder."""
    from peagle_jax.checkpoint import load_head
    from peagle_jax.training import drafter, recipe
    from peagle_jax.training.mask_token import mask_token

    config, init = plan.head, None
    if args.init is not None:
        init = load_head(args.init, target.config, dtype="float32")
        init.config, init.selector = config, None
    elif args.method != "eagle3":
        mask = mask_token(args.mask_token_id, args.target, target.config, texts)
        config = replace(config, mask_token_id=mask)
    if init is None and config.block is None and drafter.can_copy_layers(config, target):
        config = replace(config, qk_norm=target.config.qk_norm)
    with_selector = args.selector and args.method == "peagle"
    length = recipe.Length(steps=plan.shape.steps, minutes=args.minutes)
    length = length.share(1 - recipe.SELECTOR_SHARE if with_selector else 1.0)
    run = recipe.head_run(plan, args.out / "head", length, args.seed)
    run = recipe.watched(run, plan, args.patience, tuple(args.log_to))
    options = recipe.head_options(plan, args.out / "text", dtype)
    task, merge = drafter.make_task(config, target, options, run, init)
    configs = dict(head=asdict(config), run=asdict(run), options=asdict(options))
    if init is not None:
        configs["init"] = str(args.init.resolve())
    return _trained(task, merge, run, configs, target)


def _train_selector(args, plan, target, folder: Path, dtype: str) -> Path:
    """Trains a selector for the head in `folder`; returns the folder of both."""
    from peagle_jax.checkpoint import load_head
    from peagle_jax.training import recipe, selector

    head = load_head(folder, target.config, dtype=dtype)
    length = recipe.Length(steps=plan.shape.steps, minutes=args.minutes)
    length = length.share(recipe.SELECTOR_SHARE)
    run = recipe.selector_run(plan, args.out / "selector", length, args.seed)
    run = recipe.watched(run, plan, args.patience, tuple(args.log_to))
    options = recipe.head_options(plan, args.out / "text", dtype)
    rank = recipe.selector_rank(target.config.hidden_size)
    task, merge = selector.make_task(head, target, options, run, rank)
    configs = dict(head=asdict(head.config), run=asdict(run), options=asdict(options))
    return _trained(task, merge, run, configs, target)


def _trained(task, merge, run, configs: dict, target) -> Path:
    """Runs a task and writes its head; returns the folder."""
    import jax

    from peagle_jax.checkpoint import save_head
    from peagle_jax.training.trainer import fit, write_provenance

    write_provenance(run.out, configs)
    million = sum(p.size for p in task.params.values()) / 1e6
    print(f"{million:.2f} M trained parameters, {task.tokens_per_step} tokens a step", flush=True)
    params = fit(task, run)
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"peak device memory {stats['peak_bytes_in_use'] / 2**30:.1f} GiB", flush=True)
    folder = run.out / "final"
    save_head(merge(params), folder, max_position=target.config.max_position)
    print(f"head in {folder}")
    return folder


@contextmanager
def _alone(args) -> Iterator[None]:
    """Holds the lock on the folder that a run writes."""
    if "out" not in args or getattr(args, "dry_run", False):
        yield
        return
    try:
        lock = lock_folder(args.out)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            args.out.rmdir()  # of a run that was refused
        os.close(lock)


_STAGES = {"head": _head, "synthesize": _synthesize, "plan": _plan}


@writes_output("peagle-train")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `peagle-train`; `argv` stands for the command line's arguments.

    Returns:
      0, or 130 after Ctrl-C.
    Raises:
      SystemExit: with code 2, after an error of the user.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in REMOVED:
        _refuse(f"{argv[0]} {REMOVED[argv[0]]}")
    args = parser().parse_args(argv)
    try:
        check_address_space()
        check(args)
        with _alone(args):
            _STAGES[args.stage](args)
    except (ConfigError, CheckpointError, FileNotFoundError, FloatingPointError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        message = "interrupted"
        if args.stage != "plan":
            message += "; the same command goes on from the last finished part"
        print(f"\npeagle-train: {message}", file=sys.stderr)
        return 130
    return 0


def _refuse(message: str) -> None:
    print("peagle-train: error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
