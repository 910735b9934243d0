"""Shared by the sweeps: weights loaded once, one engine per method and K, prompt sets."""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from bench.command import ModelOptions, SweepOptions
from bench.rows import DATA
from pallas_kernels.formats import kind
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.rules import check_request
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import make_drafter
from peagle_jax.models import Decoder
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.prompts import find_runnable, read_jsonl, read_text
from peagle_jax.text.tokenizer import Tokenizer

Prompts = list[str | list[int]]
SETS = {"HumanEval": DATA / "HumanEval.jsonl", "MT-Bench": DATA / "mt_bench.jsonl"}


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target, its heads by method, and the name of the model in rows."""

    name: str
    dtype: str
    target: Decoder
    heads: dict[str, DraftHead]
    tokenizer: Tokenizer | None
    activations: str = "bf16"
    has_shapes_only: bool = False

    @classmethod
    def load(cls, options: ModelOptions) -> "Models":
        """From the command line's `--model`, `--drafter`, `--dtype`, `--quantization`, `--activations`, `--methods`."""
        dtype = runs.choose_dtype(options.dtype)
        target, heads, tokenizer = runs.load_methods(
            options.model,
            options.drafter,
            dtype=dtype,
            quantization=options.quantization,
            activations=options.activations,
        )
        folder = "" if options.model is None else Path(options.model).resolve().name
        return cls(
            name=options.model_name or folder or "embedded",
            dtype=dtype,
            target=target,
            heads={method: head for method, head in heads.items() if method in options.methods},
            tokenizer=tokenizer,
            activations=options.activations,
        )

    def shapes(self) -> "Models":
        """The same models with shapes for weights, for engines that compile and never run."""
        shaped = partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        heads = {method: shaped(head) for method, head in self.heads.items()}
        return replace(self, target=shaped(self.target), heads=heads, has_shapes_only=True)

    @property
    def weights(self) -> str:
        """Format of the target's matrices: its dtype, fp8 (in rows or tiles), mxfp4 or mxfp8."""
        matrix = self.target.layers[0].mlp.down
        if matrix.scale is None:
            return self.dtype
        return kind(matrix.weight[...], matrix.scale[...]).removesuffix("_tiles")

    def uses_chat(self, options: SweepOptions) -> bool:
        """Whether prompts go through the chat template: as `--chat` says, else where a model of the user has one.

        Raises:
          ConfigError: `--chat` is given, and the model has no template.
        """
        has_template = self.tokenizer is not None and bool(self.tokenizer.template_source)
        if options.chat and not has_template:
            raise ConfigError("--chat: this model has no chat template")
        return options.model is not None and has_template if options.chat is None else options.chat

    def variants(self, options: ModelOptions) -> list[tuple[str, int]]:
        """(method, K) to measure; plain decoding, if asked for, is first."""
        plain = [("none", 0)] if "none" in options.methods else []
        return plain + [(method, k) for method in self.heads for k in options.k]

    def identity(
        self, options: SweepOptions, *, prompts: str, variant: tuple[str, int], concurrency: int
    ) -> dict:
        """Row fields that identify the measurement."""
        method, num_draft = variant
        chat = {"chat": True} if hasattr(options, "chat") and self.uses_chat(options) else {}
        return chat | {
            "model": self.name,
            "dtype": self.dtype,
            "weights": self.weights,
            "activations": self.activations,
            "set": prompts,
            "method": method,
            "num_speculative_tokens": num_draft,
            "concurrency": concurrency,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }

    def runnable(
        self, name: str, prompts: Prompts, params: SamplingParams, config: EngineConfig
    ) -> tuple[list[list[int]], int]:
        """Prompts, as token ids, that an engine of `config` can run, and the number of those left out."""
        target = self.target.config
        config = replace(config, max_model_len=min(config.max_model_len, target.max_position))
        as_tokens = lambda one: self.tokenizer.encode(one) if isinstance(one, str) else one
        found = [as_tokens(prompt) for prompt in prompts]
        limits = dict(vocab_size=target.vocab_size, has_tokenizer=self.tokenizer is not None)
        return leave_out(name, found, lambda one: check_request(one, params, config, **limits))

    def engine(self, method: str, num_draft: int, config: EngineConfig) -> Engine:
        # Prompts repeat from run to run; cached ones would be measured without their prefill.
        config = replace(
            config,
            num_draft=num_draft,
            dtype=self.dtype,
            activations=self.activations,
            prefix_caching=False,
        )
        head, drafter = self.heads.get(method), None
        if head is not None and self.has_shapes_only:
            rules = dict(num_draft=num_draft, sampling=config.draft_sampling)
            make = partial(make_drafter, **rules, selector=config.selector)
            target = self.target if config.tensor_parallel == 1 else None
            drafter = jax.eval_shape(make, head, target=target)
        return Engine(self.target, head, config, tokenizer=self.tokenizer, drafter=drafter)


def engines(
    models: Models, options: ModelOptions, config: EngineConfig
) -> Iterator[tuple[str, int, Engine]]:
    """Yields warm engines one at a time, so that only one holds a cache."""
    for method, num_draft in models.variants(options):
        engine = models.engine(method, num_draft, config)
        runs.warm_up(engine)
        yield method, num_draft, engine
        del engine
        gc.collect()


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
        whose *.py files are read. Text is cut into prompts of `prompt_tokens`, with gaps of the same length.
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
    """The prompts of set `name` that pass `check`, and the number of the others; each of those is a line on
    stderr.

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
    """Raises `ConfigError` for a row without a round, whose acceptance length would be of nothing."""
    if not row["rounds"]:
        raise ConfigError(
            f"{row['set']}, {row['method']}: every text ended with its first token, so no round was measured; try "
            "--chat, --no-chat or --ignore-eos"
        )


def sampling(options: SweepOptions) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )
