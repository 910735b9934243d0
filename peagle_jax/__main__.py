"""`peagle-generate`: streams text for a prompt and reports speculative-decoding statistics.

jax is imported only after the arguments are validated, so that help and errors appear at once.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_jax.cli.command_line import given, writes_output
from peagle_jax.cli.model_folders import check_folders, local_folder, local_models
from peagle_jax.cli.options import (
    SAMPLED,
    options_of_engine,
    parser,
    read_structured,
    refuse_ineffective,
)
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.extras import check_address_space, check_installed
from peagle_jax.method.own_drafters import is_own, load_own
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.prompts import (
    Prompt,
    find_runnable,
    from_arguments,
    from_files_or_texts,
    greedy,
    read_jsonl,
)

if TYPE_CHECKING:
    from peagle_jax.engine.engine import Engine

_BATCHES = "serving.http.batch"
"""Reads the bodies of requests as the server does. It is above this package, and imported by its
name where it is installed.
"""
_OPEN_IN_BATCH = 32
INCOMPLETE = 3
"""Exit code of a run that skipped some prompts."""


def _read_prompts(args) -> list[Prompt]:
    if args.compare:
        if args.prompt or args.prompts:
            raise ConfigError("give prompts to --compare only, or do not compare")
        prompts = from_files_or_texts(args.compare)
    else:
        prompts = from_arguments(args.prompt)
        prompts += read_jsonl(Path(args.prompts)) if args.prompts else []
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit} must be at least 1")
    if args.show_drafts and (args.compare or args.json):
        raise ConfigError("--show-drafts marks texts; it has no effect on --compare and --json")
    if (args.system is not None or args.chat_option) and not args.chat:
        raise ConfigError("--system and --chat-option need --chat")
    if not prompts:
        raise ConfigError("give a PROMPT or --prompts FILE.jsonl; --help lists the options")
    return prompts[: args.limit]


def _check_models(args, config: EngineConfig) -> None:
    """Validates options against config.json, without jax; downloads hub ids first."""
    drafter = args.drafter[0] if args.drafter else None
    if args.compare:
        if sum(map(is_own, args.drafter)) > 1:
            raise ConfigError("--compare takes one drafter as module:Class, and heads")
    else:
        if len(args.drafter) > 1:
            raise ConfigError(
                "--drafter is given more than once; only --compare takes several heads"
            )
        if args.method == "none" and drafter is not None:
            raise ConfigError("--method none takes no --drafter: leave one of the two out")
    args.model, drafter = local_models(args.model, drafter, args.method)
    if args.drafter:  # else those that ship for the target
        args.drafter = [drafter, *map(local_folder, args.drafter[1:])]
    check_folders(args.model, args.drafter, config, lora=args.lora)


def _sampling(args, prompts: list[Prompt]) -> list[SamplingParams]:
    values = given(args, *SAMPLED, "logprobs", "logprobs_mode") | {
        "structured": read_structured(args)
    }
    base = SamplingParams(**values)
    params = [prompt.params(replace(base, seed=args.seed + i)) for i, prompt in enumerate(prompts)]
    if args.compare:
        return [greedy(param, p.name) for param, p in zip(params, prompts, strict=True)]
    return params


def _engine_config(args, prompts: list[Prompt], params: list[SamplingParams]) -> EngineConfig:
    concurrency = 1 if args.concurrency is None else args.concurrency
    if concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency} must be at least 1")
    most = max((param.logprobs or 0) for param in params)
    # Methods are compared at one K, and one prompt at a time is always the same load.
    is_fixed = args.compare or concurrency == 1
    differing = dict(
        num_draft=args.num_speculative_tokens if args.compare or args.method != "none" else 0,
        adaptive=args.adaptive or ("off" if is_fixed else "load"),
        max_num_seqs=min(concurrency, len(prompts)),
        prefix_caching=args.prefix_caching and not args.compare,
        max_logprobs=max(5, most),
    )
    return EngineConfig(**options_of_engine(args) | differing)


def _texts(prompts: list[Prompt], tokenizer, args) -> list[str | list[int]]:
    """Inputs of the engine: the prompts unchanged, or with --chat as conversations of one turn."""
    if not args.chat:
        return [prompt.text for prompt in prompts]
    if tokenizer is None:
        raise ConfigError("--chat needs a model with a tokenizer")
    for prompt in prompts:
        if not isinstance(prompt.text, str):
            raise ConfigError(f"{prompt.name}: --chat needs text, this prompt is token ids")
    # Chat needs no PyTorch: suppress transformers' advice to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    options = dict(args.chat_option)
    return [
        tokenizer.chat([*first, {"role": "user", "content": p.text}], **options) for p in prompts
    ]


def _after_reasoning(engine, text: list[int], params: SamplingParams) -> SamplingParams:
    """Parameters of a chat: its constraint holds for the answer, not for the reasoning before
    it."""
    if params.structured is None:
        return params
    return replace(params, structured=engine.grammars.located(params.structured, text))


def _check_constraints(engine, params: list[SamplingParams]) -> None:
    """Compiles each constraint once, so that a wrong one is refused before anything is printed."""
    for structured in {param.structured for param in params} - {None}:
        try:
            engine.grammars.compile(structured)
        except ConfigError as error:
            raise ConfigError(f"the constraint of the output: {error.rule or error}") from error


@contextlib.contextmanager
def _loading(args):
    """Turns unexpected exceptions while loading model folders into a ConfigError with their
    names."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("cannot load")
        folders = " and ".join(map(str, [args.model or "the embedded model", *args.drafter]))
        raise ConfigError(f"cannot load {folders}: {type(error).__name__}: {error}") from error


def _leave_out(prompts: list[Prompt], texts, params, engines) -> tuple[list[int], list[str]]:
    """`find_runnable` for prompts that all engines can run; reports skipped prompts on stderr."""

    def check(number: int) -> None:
        for engine in engines:
            engine.validate(texts[number], params[number])

    named = lambda prompt: f" ({prompt.name})" if prompt.name != prompt.where else ""
    numbers, left_out = find_runnable([p.where + named(p) for p in prompts], check)
    for line in left_out:
        print(f"peagle-generate: left out: {line}", file=sys.stderr)
    return numbers, left_out


class _Printer:
    """Prints text: streamed for one prompt, in blocks on completion for several."""

    def __init__(self, prompts: list[Prompt], params: list[SamplingParams], engine, args):
        from tqdm import tqdm

        from peagle_jax.cli.draft_marks import MarkedText, mark_for

        mark = mark_for(sys.stdout, os.environ) if args.show_drafts else None
        self._names = [prompt.name for prompt in prompts]
        self._texts = [
            MarkedText(engine.tokenizer, mark, param.stop, param.min_tokens) for param in params
        ]
        self._quiet = args.json
        self._single = len(prompts) == 1
        end = "\n" if args.chat else ""  # a reply is not the rest of the prompt's line
        self._text = [p.text + end if isinstance(p.text, str) else "" for p in prompts]
        self._bar = tqdm(
            total=len(prompts), unit="prompt", disable=None if not self._single else True
        )
        if self._single and not args.json:
            print(self._text[0], end="", flush=True)

    def update(self, request, tokens: list[int]) -> None:
        """`Engine.generate`'s callback."""
        number = request.id
        if request.is_finished:
            self._bar.update()
        if self._quiet:
            return
        made_by = request.last_round if tokens else None
        fresh = self._texts[number].add(tokens, made_by, is_last=request.is_finished)
        if self._single:
            print(fresh, end="\n" if request.is_finished else "", flush=True)
            return
        self._text[number] += fresh
        if request.is_finished:
            block = f"=== {self._names[number]}\n{self._text[number]}\n"
            self._bar.write(block, file=sys.stdout)

    def close(self) -> None:
        self._bar.close()


def _legend() -> str:
    from peagle_jax.cli.draft_marks import legend

    return legend(sys.stdout, os.environ)


def _completion_json(prompt: Prompt, completion) -> dict:
    fields = asdict(completion)
    prompt_tokens = fields.pop("prompt")
    return {"name": prompt.name, "prompt": prompt.text, "prompt_tokens": prompt_tokens} | fields


def _generate(args, prompts: list[Prompt], params: list[SamplingParams], config) -> int:
    from tqdm import tqdm

    from peagle_jax.cli import runs

    start = time.perf_counter()
    with _loading(args):
        engine = _load(args, config)
        texts = _texts(prompts, engine.tokenizer, args)
    if args.chat:
        params = [_after_reasoning(engine, *pair) for pair in zip(texts, params, strict=True)]
    if engine.tokenizer is not None:
        _check_constraints(engine, params)
    numbers, left_out = _leave_out(prompts, texts, params, [engine])
    prompts, texts, params = ([some[n] for n in numbers] for some in (prompts, texts, params))
    loaded = time.perf_counter()
    sizes = engine.config.batch_buckets
    later = len(engine.programs.rounds_of_any) + len(engine.programs.small_prefills)
    total = engine.num_programs - later + len(sizes)
    runs.compile_in_sight(engine, sizes=sizes)
    with tqdm(total=total, desc="programs", leave=False, disable=None) as bar:
        engine.warm_up(bar.update, sizes=sizes)
    logging.getLogger(__name__).info(
        "weights in %.2f s, programs in %.2f s", loaded - start, time.perf_counter() - loaded
    )
    printer = _Printer(prompts, params, engine, args)
    try:
        with runs.compiling(engine):
            result = runs.run(engine, texts, params, on_update=printer.update)
    finally:
        printer.close()
    if args.json:
        for prompt, completion in zip(prompts, result.completions, strict=True):
            print(json.dumps(_completion_json(prompt, completion)))
        summary = result.as_json() | {"dtype": config.dtype, "left_out": left_out}
        print(json.dumps({"summary": summary}))
    else:
        sys.stdout.flush()
        print("-" * 40, runs.summary(result), sep="\n", file=sys.stderr)
        if args.show_drafts:
            print(_legend(), file=sys.stderr)
    failed = _report_failures(prompts, result)
    return INCOMPLETE if left_out or failed else 0


def _report_failures(prompts: list[Prompt], result) -> int:
    """Reports failed texts with their errors on stderr. Returns their number."""
    failed = [(p, c.error) for p, c in zip(prompts, result.completions, strict=True) if c.error]
    for prompt, error in failed:
        print(f"peagle-generate: failed: {prompt.name}: {error}", file=sys.stderr)
    return len(failed)


def _compare(args, prompts: list[Prompt], params: list[SamplingParams], config) -> int:
    from tqdm import tqdm

    from peagle_jax.cli import runs

    with _loading(args):
        rules = dict(dtype=config.dtype, quantization=args.quantization, taps=args.taps)
        rules |= dict(tensor_parallel=args.tensor_parallel, activations=args.activations)
        rules |= dict(lora=args.lora)
        folders = [drafter for drafter in args.drafter if not is_own(drafter)]
        target, heads, tokenizer = runs.load_methods(args.model, folders, **rules)
        texts = _texts(prompts, tokenizer, args)
        own = load_own(next(filter(is_own, args.drafter), None), target, config)
    engines = runs.make_engines(target, heads, config, tokenizer=tokenizer, own=own)
    numbers, left_out = _leave_out(prompts, texts, params, engines.values())
    prompts, texts, params = ([some[n] for n in numbers] for some in (prompts, texts, params))
    results, failures, ties = [], [], {}
    shown_ties = ties if config.dtype == "bfloat16" else None
    for method, engine in engines.items():
        with tqdm(total=len(prompts), desc=runs.METHOD_NAMES[method], disable=None) as bar:
            runs.warm_up(engine)
            advance = lambda request, tokens, bar=bar: bar.update(request.is_finished)
            results.append(runs.run(engine, texts, params, on_update=advance))
        differences = runs.find_differences(engines["none"], results[0], results[-1])
        ties[method] = sum(difference.is_tie for difference in differences)
        failures += [(method, difference) for difference in differences if not difference.is_tie]
    if args.json:
        for result in results:
            print(json.dumps(result.as_json() | {"ties": ties[result.method]}))
        report = {"dtype": config.dtype, "identical": not failures, "left_out": left_out}
        print(json.dumps(report))
    else:
        print(runs.comparison_table(results, shown_ties))
    for method, one in failures:
        print(
            f"{runs.METHOD_NAMES[method]} differs from plain decoding: {prompts[one.prompt].name}, "
            f"output token {one.position}",
            file=sys.stderr,
        )
    if not failures and not args.json:
        print(f"{len(prompts)} outputs are those of plain decoding ({config.dtype})")
    failed = _report_failures(prompts, results[0])
    if failures:
        return 1
    return INCOMPLETE if left_out or failed else 0


def _batch(args) -> int:
    """Answers a file of requests, see `serving.http.batch`."""
    check_installed("serve", "peagle-generate --batch")
    slots = _OPEN_IN_BATCH if args.concurrency is None else args.concurrency
    settings = import_module("serving.settings").Settings(model=args.model)
    differing = dict(
        num_draft=args.num_speculative_tokens if args.method != "none" else 0,
        adaptive=args.adaptive or "load",
        max_num_seqs=slots,
        # A request may have several sequences.
        max_waiting=4 * slots * settings.max_n,
    )
    config = EngineConfig(**options_of_engine(args) | differing)
    with _loading(args):
        _check_models(args, config)
    with contextlib.closing(import_module(_BATCHES).Batch(*map(Path, args.batch))) as batch:
        config = _on_this_device(args, config)
        with _loading(args):
            engine = _load(args, config)
        result = batch.run(engine, settings)
    left = f", {result.left} left: run the command again" if result.left else ""
    print(f"{result.answered} answered, {result.failed} failed{left}", file=sys.stderr)
    if result.left:
        return 1
    return INCOMPLETE if result.failed else 0


def _on_this_device(args, config: EngineConfig) -> EngineConfig:
    """The config with this device's dtype, sizes and drafts; keeps compiled programs on disk."""
    from peagle_jax.cli import runs

    config = runs.with_prefill_sizes(replace(config, dtype=runs.choose_dtype(args.dtype)))
    if not args.no_cache:
        folder = runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
        config = replace(config, programs_folder=folder)
    return config


def _load(args, config: EngineConfig) -> "Engine":
    from peagle_jax.cli.loading import load

    drafter = args.drafter[0] if args.drafter else None
    weights = dict(quantization=args.quantization, taps=args.taps, lora=args.lora)
    return load(args.model, drafter, method=args.method, config=config, **weights)


def _run(args) -> int:
    refuse_ineffective(args)
    if args.batch:
        return _batch(args)
    prompts = _read_prompts(args)
    params = _sampling(args, prompts)
    config = _engine_config(args, prompts, params)
    with _loading(args):
        _check_models(args, config)
    config = _on_this_device(args, config)
    return (_compare if args.compare else _generate)(args, prompts, params, config)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


@writes_output("peagle-generate")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_intermixed_args(argv)
    with contextlib.suppress(AttributeError):  # stdout may be replaced by what has no encoding
        sys.stdout.reconfigure(errors="replace")
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s")
    fail = lambda message: print(
        "peagle-generate: error:", " ".join(str(message).split()), file=sys.stderr
    )
    try:
        check_address_space()
        return _run(args)
    except ConfigError as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        fail("the device is out of memory; lower --concurrency or --max-model-len")
        return 2


if __name__ == "__main__":
    sys.exit(main())
