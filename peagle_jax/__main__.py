"""`peagle-generate`: text from a prompt, streamed, with what speculation did for it.

jax is imported once the arguments are known to be good: help and mistakes answer at once.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from peagle_jax.config import ConfigError, EngineConfig, SamplingParams
from peagle_jax.prompts import Prompt, from_arguments, from_files_or_texts, read_jsonl

_DESCRIPTION = """\
Writes text with P-EAGLE parallel speculative decoding: a small head drafts K tokens in one pass, the
target model checks them in one pass, and the text is exactly what the target alone would write.
Without --model the small code model that comes with the package is used."""

_EPILOG = """\
prompt files (--prompts, --compare): JSON lines of HumanEval, of MT-Bench (first turns), or
  {"prompt": "text" or [token ids], "max_tokens": 64, "temperature": 0.8, ...}
comparing: --compare decodes greedily with every method and exits with 1 when an output differs from
  plain decoding's. In float32 outputs must be equal. In bfloat16 a round of K+1 rows may round apart
  from a single row, so a first differing token is forgiven, and counted in the table as a tie, when
  plain decoding gives both candidates a log-probability within 0.05 nats of its likeliest token.
exit codes: 0 done, 1 outputs differ, 2 bad input (one line says what), 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


def _named_value(text: str) -> tuple[str, object]:
    """`NAME=VALUE`; the value is JSON, or else text as it is."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be layer numbers, as 2,24,45") from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="peagle-generate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="text to continue")
    add("--prompts", metavar="FILE.jsonl", help="file of prompts, see below")
    add("--limit", type=int, metavar="N", help="use the first N prompts only")
    add("--compare", nargs="+", metavar="FILE_OR_PROMPT", help="compare methods on these prompts")
    add("--chat", action="store_true", help="send each prompt through the model's chat template")
    add("--system", metavar="TEXT", help="with --chat: what stands before the conversation")
    add(
        "--chat-option", type=_named_value, action="append", default=[], metavar="NAME=VALUE",
        help="with --chat: set what the template takes, as enable_thinking=false; repeatable",
    )  # fmt: skip

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", metavar="DIR", help="Hugging Face folder of the target (default: embedded)")
    add(
        "--drafter", metavar="DIR", action="append", default=[],
        help="folder of the head; with --compare it may be given once for each method",
    )  # fmt: skip
    add(
        "--method", choices=("none", "eagle3", "peagle"),
        help="default: what the head was made for; peagle for the embedded model",
    )  # fmt: skip
    add(
        "--num-speculative-tokens", "-K", type=int, default=7, metavar="K",
        help="draft tokens per round (default: 7)",
    )  # fmt: skip
    add(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="auto: bfloat16 on GPUs, float32 on CPUs",
    )  # fmt: skip
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="default: as --dtype")
    add(
        "--quantization", choices=("fp8",),
        help="quantise an unquantised target while it is read (128x128 blocks)",
    )  # fmt: skip
    add(
        "--taps", type=_layer_ids, metavar="I,J,K",
        help="layers whose inputs the head reads, where its config.json says otherwise",
    )  # fmt: skip
    add("--concurrency", type=int, default=1, metavar="N", help="prompts decoded at once")
    add("--max-model-len", type=int, default=2048, metavar="N", help="prompt and output tokens")

    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, default=256, metavar="N", help="new tokens (default: 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="N")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, default=0, metavar="N", help="prompt i samples with seed N+i")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")

    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object per prompt, then a summary object")
    add(
        "--logprobs", type=int, metavar="N",
        help="with --json: log-probability of each token and of the N likeliest",
    )  # fmt: skip
    add("--verbose", "-v", action="store_true", help="log what runs where and how long it takes")
    add("--no-cache", action="store_true", help="do not keep compiled programs on disk")
    return parser


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
    if (args.system is not None or args.chat_option) and not args.chat:
        raise ConfigError("--system and --chat-option need --chat")
    if not prompts:
        raise ConfigError("give a PROMPT or --prompts FILE.jsonl; --help lists the options")
    return prompts[: args.limit]


def _sampling(args, prompts: list[Prompt]) -> list[SamplingParams]:
    base = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop=tuple(args.stop),
        logprobs=args.logprobs,
    )
    return [prompt.params(replace(base, seed=args.seed + i)) for i, prompt in enumerate(prompts)]


def _engine_config(args, prompts: list[Prompt], params: list[SamplingParams]) -> EngineConfig:
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency} must be at least 1")
    most = max((one.logprobs or 0) for one in params)
    return EngineConfig(
        num_draft=args.num_speculative_tokens if args.compare or args.method != "none" else 0,
        max_num_seqs=min(args.concurrency, len(prompts)),
        max_model_len=args.max_model_len,
        max_logprobs=max(5, most),
        kv_cache_dtype=args.kv_cache_dtype,
    )


def _texts(prompts: list[Prompt], tokenizer, args) -> list[str | list[int]]:
    """What the engine gets: the prompts as they are, or as conversations of one turn."""
    if not args.chat:
        return [prompt.text for prompt in prompts]
    if tokenizer is None:
        raise ConfigError("--chat needs a model with a tokenizer")
    for prompt in prompts:
        if not isinstance(prompt.text, str):
            raise ConfigError(f"{prompt.name}: --chat needs text, this prompt is token ids")
    # Chat needs no PyTorch: transformers' advice to install it would only confuse.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    options = dict(args.chat_option)
    return [
        tokenizer.chat([*first, {"role": "user", "content": p.text}], **options) for p in prompts
    ]


@contextlib.contextmanager
def _loading(args):
    """What goes wrong while reading folders that others wrote is a mistake in them, not here."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("cannot load")
        folders = " and ".join([args.model or "the embedded model", *args.drafter])
        raise ConfigError(f"cannot load {folders}: {type(error).__name__}: {error}") from error


def _check(engine, prompts: list[Prompt], texts, params: list[SamplingParams]) -> None:
    """Lets the engine refuse what it cannot run before anything is compiled or shown."""
    for prompt, text, one in zip(prompts, texts, params, strict=True):
        try:
            engine.abort(engine.add_request(text, one, request_id=prompt.name))
        except ConfigError as error:
            where = "" if prompt.name in str(error) else f"{prompt.name}: "
            raise ConfigError(f"{where}{error}") from error


class _Printer:
    """Shows text: one prompt as it arrives, several in blocks as each is finished."""

    def __init__(self, prompts: list[Prompt], params: list[SamplingParams], engine, args):
        from tqdm import tqdm

        from peagle_jax.text import TextStream

        self._names = [prompt.name for prompt in prompts]
        self._streams = []
        if engine.tokenizer is not None and not args.json:
            self._streams = [TextStream(engine.tokenizer, one.stop) for one in params]
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
        number = request.id - len(self._names)  # `_check` used up that many
        if request.is_finished:
            self._bar.update()
        if self._quiet:
            return
        fresh = self._fresh(number, tokens, request.is_finished)
        if self._single:
            print(fresh, end="\n" if request.is_finished else "", flush=True)
            return
        self._text[number] += fresh
        if request.is_finished:
            block = f"=== {self._names[number]}\n{self._text[number]}\n"
            self._bar.write(block, file=sys.stdout)

    def _fresh(self, number: int, tokens: list[int], is_last: bool) -> str:
        if not self._streams:
            return "".join(f" {token}" for token in tokens)
        stream = self._streams[number]
        return stream.add(tokens) + (stream.finish() if is_last else "")

    def close(self) -> None:
        self._bar.close()


def _completion_json(prompt: Prompt, completion) -> dict:
    fields = asdict(completion)
    prompt_tokens = fields.pop("prompt")
    return {"name": prompt.name, "prompt": prompt.text, "prompt_tokens": prompt_tokens} | fields


def _generate(args, prompts: list[Prompt], params: list[SamplingParams], config) -> int:
    from tqdm import tqdm

    from peagle_jax import runs
    from peagle_jax.loading import load

    if len(args.drafter) > 1:
        raise ConfigError("--drafter is given more than once; only --compare takes several heads")
    start = time.perf_counter()
    with _loading(args):
        drafter = args.drafter[0] if args.drafter else None
        weights = dict(quantization=args.quantization, taps=args.taps)
        engine = load(args.model, drafter, method=args.method, config=config, **weights)
        texts = _texts(prompts, engine.tokenizer, args)
    _check(engine, prompts, texts, params)
    loaded = time.perf_counter()
    with tqdm(total=engine.num_programs, desc="compiling", leave=False, disable=None) as bar:
        engine.warm_up(bar.update)
    logging.getLogger(__name__).info(
        "weights in %.2f s, programs in %.2f s", loaded - start, time.perf_counter() - loaded
    )
    printer = _Printer(prompts, params, engine, args)
    try:
        result = runs.run(engine, texts, params, on_update=printer.update)
    finally:
        printer.close()
    if args.json:
        for prompt, completion in zip(prompts, result.completions, strict=True):
            print(json.dumps(_completion_json(prompt, completion)))
        print(json.dumps({"summary": result.as_json() | {"dtype": config.dtype}}))
    else:
        sys.stdout.flush()
        print("-" * 40, runs.summary(result), sep="\n", file=sys.stderr)
    return 0


def _compare(args, prompts: list[Prompt], params: list[SamplingParams], config) -> int:
    from tqdm import tqdm

    from peagle_jax import runs

    params = [runs.greedy(one, p.name) for one, p in zip(params, prompts, strict=True)]
    with _loading(args):
        target, heads, tokenizer = runs.load_methods(
            args.model,
            args.drafter,
            dtype=config.dtype,
            quantization=args.quantization,
            taps=args.taps,
        )
        texts = _texts(prompts, tokenizer, args)
    if not heads:
        raise ConfigError(f"--compare needs a head for {args.model}: give --drafter DIR")
    engines = runs.make_engines(target, heads, config, tokenizer=tokenizer)
    for engine in engines.values():
        _check(engine, prompts, texts, params)
    results, failures, ties = [], [], {}
    for method, engine in engines.items():
        with tqdm(total=len(prompts), desc=runs.METHOD_NAMES[method], disable=None) as bar:
            runs.warm_up(engine)
            advance = lambda request, tokens, bar=bar: bar.update(request.is_finished)
            results.append(runs.run(engine, texts, params, on_update=advance))
        differences = runs.find_differences(engines["none"], results[0], results[-1])
        ties[method] = sum(one.is_tie for one in differences)
        failures += [(method, one) for one in differences if not one.is_tie]
    if args.json:
        for result in results:
            print(json.dumps(result.as_json() | {"ties": ties[result.method]}))
        print(json.dumps({"dtype": config.dtype, "identical": not failures}))
    else:
        print(runs.comparison_table(results, ties if config.dtype == "bfloat16" else None))
    for method, one in failures:
        print(
            f"{runs.METHOD_NAMES[method]} differs from plain decoding: {prompts[one.prompt].name}, "
            f"output token {one.position}",
            file=sys.stderr,
        )
    if not failures and not args.json:
        print(f"{len(prompts)} outputs are those of plain decoding ({config.dtype})")
    return 1 if failures else 0


def _run(args) -> int:
    prompts = _read_prompts(args)
    params = _sampling(args, prompts)
    config = _engine_config(args, prompts, params)

    from peagle_jax import runs

    config = replace(config, dtype=runs.choose_dtype(args.dtype))
    if not args.no_cache:
        runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    return (_compare if args.compare else _generate)(args, prompts, params, config)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    with contextlib.suppress(AttributeError):  # stdout may be replaced by what has no encoding
        sys.stdout.reconfigure(errors="replace")
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s")
    fail = lambda message: print(
        "peagle-generate: error:", " ".join(str(message).split()), file=sys.stderr
    )
    try:
        return _run(args)
    except ConfigError as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        fail("the device is out of memory; lower --concurrency or --max-model-len")
        return 2


if __name__ == "__main__":
    sys.exit(main())
