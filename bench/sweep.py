"""Prompt sets, and engines one after the other."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.cells import Variant
from bench.command import SweepOptions
from bench.models import Models
from bench.rows import DATA
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.rules import check_request
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.prompts import find_runnable, read_jsonl, read_text
from peagle_jax.text.tokenizer import Tokenizer

Prompts = list[str | list[int]]
SETS = {"HumanEval": DATA / "HumanEval.jsonl", "MT-Bench": DATA / "mt_bench.jsonl"}


def prompts_of(
    models: Models, options: SweepOptions, spec: str, config: EngineConfig, limit: int | None = None
) -> tuple[str, list[list[int]], int]:
    """The name of a prompt set, and what `runnable` says of its prompts."""
    name, prompts = prompt_set(
        spec,
        models.tokenizer,
        prompt_tokens=options.prompt_tokens,
        limit=limit,
        chat=models.uses_chat(options),
    )
    return name, *runnable(models, name, prompts, sampling(options), config)


def runnable(
    models: Models, name: str, prompts: Prompts, params: SamplingParams, config: EngineConfig
) -> tuple[list[list[int]], int]:
    """Prompts, as token ids, that an engine of `config` can run, and how many are left out."""
    target = models.target.config
    config = replace(config, max_model_len=min(config.max_model_len, target.max_position))
    as_tokens = lambda one: models.tokenizer.encode(one) if isinstance(one, str) else one
    found = [as_tokens(prompt) for prompt in prompts]
    check = partial(
        check_request,
        params=params,
        config=config,
        vocab_size=target.vocab_size,
        has_tokenizer=models.tokenizer is not None,
    )
    return leave_out(name, found, check)


def engines(
    models: Models, options: SweepOptions, config: EngineConfig
) -> Iterator[tuple[Variant, Engine]]:
    """Yields warm engines one at a time; each gives its cache back before the next is made."""
    for variant in models.variants(options):
        own = replace(config, adaptive=variant.adaptive, draft_sampling=options.draft_sampling)
        engine = models.engine(variant.method, variant.num_draft, own)
        runs.warm_up(engine)
        yield variant, engine
        engine.release_cache()


def prompt_set(
    spec: str,
    tokenizer: Tokenizer | None,
    *,
    prompt_tokens: int,
    limit: int | None,
    chat: bool = False,
) -> tuple[str, Prompts]:
    """A prompt set by name, or from NAME=FILE.

    Args:
      spec: "HumanEval", "MT-Bench", "NAME=FILE.jsonl", or "NAME=SOURCE": a text file, or a folder
        whose *.py files are read. Text is cut into prompts of `prompt_tokens`, with gaps of the
        same length.
      limit: most prompts; text is sampled evenly.
      chat: whether texts of JSON lines are a user's turn in the model's chat template.

    Raises:
      ConfigError: the file cannot be read, the name is unknown, or the template fails.
    """
    name, _, file = spec.partition("=")
    path = Path(file) if file else SETS.get(name)
    if path is None:
        raise ConfigError(f"unknown prompt set {name!r}; known are {', '.join(SETS)} and NAME=FILE")
    if path.suffix == ".jsonl":
        texts = [prompt.text for prompt in read_jsonl(path)][:limit]
        turn = lambda text: tokenizer.chat([dict(role="user", content=text)])
        return name, [turn(text) if chat and isinstance(text, str) else text for text in texts]
    if tokenizer is None:
        raise ConfigError(f"{path}: cutting text into prompts needs a model with a tokenizer")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    prompts: Prompts = []
    for one in files:
        tokens = tokenizer.encode(read_text(one))
        starts = range(0, max(1, len(tokens) - prompt_tokens), 2 * prompt_tokens)
        prompts += [tokens[start : start + prompt_tokens] for start in starts if tokens]
    if not prompts:
        raise ConfigError(f"{path}: holds no text to cut prompts from")
    stride = 1 if limit is None else max(1, len(prompts) // limit)
    return name, prompts[::stride][:limit]


def leave_out(name: str, prompts: Prompts, check: Callable) -> tuple[Prompts, int]:
    """The prompts of set `name` that pass `check`, and the number of the others; each of those is a
    line on stderr.

    Args:
      check: called with a prompt; raises `ConfigError` for one that cannot run.
    Raises:
      ConfigError: no prompt can run.
    """
    names = [f"{name}: prompt {number}" for number in range(1, len(prompts) + 1)]
    numbers, left_out = find_runnable(names, lambda number: check(prompts[number]))
    for line in left_out:
        print(f"peagle-bench: left out: {line}", file=sys.stderr)
    return [prompts[number] for number in numbers], len(left_out)


def check_rounds(row: dict) -> None:
    """Raises `ConfigError` for a row without a round, whose acceptance length would be of
    nothing."""
    if not row["rounds"]:
        raise ConfigError(
            f"{row['set']}, {row['method']}: every text ended with its first token, so no round "
            "was measured; try --chat, --no-chat or --ignore-eos"
        )


def sampling(options: SweepOptions) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )
