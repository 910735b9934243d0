"""Runs prompts through an engine and measures them; compares methods on one target.

`peagle-generate` and the benches share this module, so that all report the same quantities.
"""

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from pallas_kernels import dispatch
from peagle_jax.checkpoint import Quantization, load_head
from peagle_jax.checkpoint.shipped import shipped_heads
from peagle_jax.cli.loading import load_weights
from peagle_jax.cli.model_folders import EMBEDDED_HEADS, embedded, local_folder
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device import compilation, stored_programs
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.completion import Completion
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import tile_columns
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

TIE_NATS = 0.05
"""bfloat16 only: tokens within this log-probability (nats) of the most likely one count as ties."""

METHOD_NAMES = {
    "none": "plain",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "own": "own drafter",
}
_WARM_UP_TOKENS = 8
_TIE_CANDIDATES = 5


def choose_dtype(requested: str) -> str:
    """`requested`, where "auto" is bfloat16 on a GPU or a TPU and float32 elsewhere.

    Raises:
      ConfigError: jax finds no device.
    """
    try:
        platform = dispatch.platform()
    except RuntimeError as error:
        raise ConfigError(f"jax finds no device: {error}") from error
    if requested != "auto":
        return requested
    return "bfloat16" if platform in ("cuda", "rocm", "oneapi", "gpu", "tpu") else "float32"


def on_gpu() -> bool:
    """Whether programs run on an NVIDIA GPU."""
    return dispatch.platform() == "cuda"


def prefill_sizes(config: EngineConfig) -> dict[str, int | bool]:
    """Fields of `config` with which a server on this device prefills, where nothing else is asked
    for.

    A GPU reads all weights for a call of 128 tokens, as for one of 512 or more.
    """
    if not on_gpu():
        return {}
    chunk, rows = min(512, config.max_model_len), min(4, config.max_num_seqs)
    return dict(prefill_chunk=chunk, prefill_rows=rows, small_prefills=True)


def with_prefill_sizes(config: EngineConfig, **given) -> EngineConfig:
    """The config with the fields `given`, and with those of `prefill_sizes` that are not given or
    None."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(config, **prefill_sizes(replace(config, **chosen)) | chosen)


def keep_compiled_programs(cache_home: str | None) -> Path:
    """Keeps what jax compiles on disk, so that the next start compiles nothing.

    Args:
      cache_home: the user's cache folder; None is `~/.cache`.

    Returns:
      The folder for whole programs, `EngineConfig.programs_folder`.
    """
    folder = programs_folder(cache_home)
    stored_programs.use_library_cache(folder.parent)
    return folder


def programs_folder(cache_home: str | None) -> Path:
    """The folder of `keep_compiled_programs`."""
    return Path(cache_home or "~/.cache").expanduser() / "peagle-jax" / stored_programs.FOLDER


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of prompts on one engine.

    `num_draft` is the engine's J, and `bucket_drafts` the different K of its rounds, ascending.
    `seconds` is the wall time of generation, without compilation.
    """

    method: str
    num_draft: int
    bucket_drafts: tuple[int, ...]
    completions: list[Completion]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def drafts_per_round(self) -> str:
        """K as printed: "7", or "0 to 7" if it changes with the batch size."""
        least, most = self.bucket_drafts[0], self.bucket_drafts[-1]
        return str(most) if least == most else f"{least} to {most}"

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.completions)

    @property
    def time_to_first_token(self) -> float:
        """Median over requests, in seconds, including queueing."""
        return statistics.median(c.time_to_first_token for c in self.completions)

    def as_json(self) -> dict:
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_draft,
            "prompts": len(self.completions),
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": self.time_to_first_token,
            **self.acceptance.as_row(),
        }


def method_of(engine: Engine) -> str:
    """The drafting method of an engine: a key of `METHOD_NAMES`."""
    return "none" if engine.drafter_config is None else engine.drafter_config.method


def _bucket_drafts(engine: Engine) -> tuple[int, ...]:
    """The different K of its rounds, ascending."""
    return tuple(sorted({shape.num_draft for shape in engine.programs.shapes}))


def run(
    engine: Engine,
    prompts: Sequence[str | list[int]],
    params: Sequence[SamplingParams],
    *,
    on_update: Callable[[Request, list[int]], None] = lambda request, tokens: None,
) -> Run:
    """Generates and measures. Call `warm_up` first, or the time includes compilation."""
    start = time.perf_counter()
    completions = engine.generate(prompts, params, on_update=on_update)
    return Run(
        method=method_of(engine),
        num_draft=engine.config.num_draft,
        bucket_drafts=_bucket_drafts(engine),
        completions=completions,
        seconds=time.perf_counter() - start,
    )


def compiles_in_children() -> bool:
    """Whether programs compile in child processes: on GPUs. A CPU compiles small programs on the
    cores that also serve."""
    return on_gpu()


def compile_missing(
    engine: Engine,
    *,
    sizes: Sequence[int] | None = None,
    only_greedy: bool = False,
    report: Callable[[compilation.Progress], None] = lambda progress: None,
) -> None:
    """`Engine.compile_missing` where programs compile in child processes; elsewhere
    `Engine.warm_up` compiles them."""
    if compiles_in_children():
        engine.compile_missing(sizes=sizes, only_greedy=only_greedy, report=report)


def compile_in_sight(engine: Engine, *, sizes: Sequence[int] | None = None) -> None:
    """`compile_missing` with a progress bar."""
    with tqdm(desc="compiling", unit="program", leave=False, disable=None) as bar:

        def show(progress: compilation.Progress) -> None:
            bar.total, bar.n = progress.total, progress.done
            bar.refresh()

        compile_missing(engine, sizes=sizes, report=show)


def warm_up(engine: Engine, *, sizes: Sequence[int] | None = None) -> None:
    """Compiles (see `Engine.warm_up`), then decodes a few tokens, because first calls allocate
    memory."""
    compile_missing(engine, sizes=sizes)
    engine.warm_up(sizes=sizes)
    first_rounds(engine)


def first_rounds(engine: Engine) -> None:
    """Decodes a few tokens, because first calls allocate memory and connect devices."""
    if engine.config.max_model_len > 1:
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        engine.generate([[0]] * engine.config.max_num_seqs, params)


@contextlib.contextmanager
def compiling(engine: Engine) -> Iterator[None]:
    """Within the block a thread gets the programs that the engine lacks: on a GPU from child
    processes.

    The end of the block waits for the one that it compiles or loads.
    """
    ends = threading.Event()

    def compile_all() -> None:
        try:
            if compiles_in_children():
                engine.compile_missing(
                    has_low_priority=True, must_end=ends.is_set, on_done=engine.load
                )
            while not ends.is_set() and engine.compile_next():
                pass
        except Exception:
            _log.exception("a program cannot be compiled; rounds use those that are compiled")

    thread = threading.Thread(target=compile_all, name="compiler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def load_methods(
    model: str | Path | None,
    drafters: Sequence[str | Path],
    *,
    dtype: str,
    quantization: Quantization | None = None,
    taps: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    activations: str = "bf16",
    lora: str | None = None,
    methods: Collection[str] = METHOD_NAMES,
) -> tuple[Decoder, dict[str, DraftHead], Tokenizer | None]:
    """A target and its heads by method, "eagle3" before "peagle".

    Args:
      model: Hugging Face folder; None is the embedded model with its own heads.
      drafters: head folders; none: those that ship for the target.
      methods: names of the heads that are wanted; others that ship are not read.
      dtype, quantization, taps, tensor_parallel, activations, lora: as in
        `loading.load_weights`.

    Raises:
      ConfigError: something is missing or does not fit, or two heads use one method.
    """
    devices = Devices(tensor_parallel)
    rules = dict(dtype=dtype, quantization=quantization, tensor_parallel=tensor_parallel)
    target, _, tokenizer = load_weights(
        model, None, method="none", activations=activations, lora=lora, **rules
    )
    if not drafters:
        if model is None:
            shipped = {method: embedded(method) for method in EMBEDDED_HEADS}
        else:
            shipped = shipped_heads(local_folder(model))
        drafters = [folder for method, folder in shipped.items() if method in methods]
    heads: dict[str, DraftHead] = {}
    for folder in drafters:
        head = load_head(folder, target.config, dtype=dtype, taps=taps, devices=devices)
        if head.config.method in heads:
            raise ConfigError(f"{folder}: a second {head.config.method} head; give one a method")
        heads[head.config.method] = head
    tile_columns(target, *heads.values())
    return target, dict(sorted(heads.items())), tokenizer


def make_engines(
    target: Decoder,
    heads: dict[str, DraftHead],
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None,
    own: Drafter | None = None,
) -> dict[str, Engine]:
    """Plain decoding ("none"), one engine per head and one of an own drafter, all on the same
    target arrays."""
    engines = {
        method: Engine(target, head, config, tokenizer=tokenizer)
        for method, head in ({"none": None} | heads).items()
    }
    if own is not None:
        engines["own"] = Engine(target, None, config, tokenizer=tokenizer, drafter=own)
    return engines


@dataclass(frozen=True)
class Difference:
    """Prompt number and first output position at which a greedy output differs from plain
    decoding."""

    prompt: int
    position: int
    is_tie: bool


def find_differences(plain: Engine, reference: Run, other: Run) -> list[Difference]:
    """First difference of every prompt whose outputs differ.

    In bfloat16 a library's matrix product may round J+1 rows differently from one row. There a
    difference is a tie if plain decoding gives both tokens a log-probability within `TIE_NATS` of
    the most likely.
    """
    differences = []
    for number, (a, b) in enumerate(zip(reference.completions, other.completions, strict=True)):
        if a.tokens == b.tokens:
            continue
        pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
        position = next((i for i, (x, y) in pairs if x != y), None)
        if position is None:  # one is a prefix of the other: never a rounding effect
            shorter = min(len(a.tokens), len(b.tokens))
            differences.append(Difference(number, shorter, False))
            continue
        chosen = {a.tokens[position], b.tokens[position]}
        prefix = a.prompt + a.tokens[:position]
        is_tie = plain.config.dtype == "bfloat16" and _tied(plain, prefix, chosen)
        differences.append(Difference(number, position, is_tie))
    return differences


def _tied(plain: Engine, prefix: list[int], candidates: set[int]) -> bool:
    """Whether all `candidates` for the token after `prefix` are within `TIE_NATS` of the most
    likely."""
    num = min(_TIE_CANDIDATES, plain.config.max_logprobs)
    completion = plain.generate([prefix], SamplingParams(max_tokens=1, logprobs=num))[0]
    top = completion.logprobs[0].top
    near = {token for token, logprob in top if top[0][1] - logprob < TIE_NATS}
    return candidates <= near


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a text table: first column left-aligned, others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    align = lambda line: "  ".join(
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "\n".join([align(header), "  ".join("-" * w for w in widths), *map(align, rows)])


def comparison_table(runs: Sequence[Run], ties: dict[str, int] | None) -> str:
    """One line per method; the first run is plain decoding. `ties` adds a column (bfloat16)."""
    header = ["method", "K", "tokens/s", "vs plain", "AL", "accepted at position 1, 2, ..."]
    if ties is not None:
        header.insert(5, "ties")
    rows = []
    for run in runs:
        counts = run.acceptance
        row = [
            METHOD_NAMES[run.method],
            run.drafts_per_round,
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / runs[0].tokens_per_second:.2f}x",
            f"{counts.length:.2f}",
            rates(counts) or "-",
        ]
        if ties is not None:
            row.insert(5, str(ties.get(run.method, 0)))
        rows.append(row)
    return table(header, rows)


def rates(counts: Acceptance) -> str:
    """Acceptance per position, as printed."""
    return " ".join(f"{rate:.2f}" for rate in counts.rates)


def summary(run: Run) -> str:
    """Two lines for people."""
    first = "time to first token" if len(run.completions) == 1 else "median time to first token"
    lines = [
        f"{run.tokens_per_second:.1f} tokens/s ({run.num_tokens} tokens in {run.seconds:.2f} s), "
        f"{first} {run.time_to_first_token:.3f} s"
    ]
    counts = run.acceptance
    if run.num_draft:
        lines.append(
            f"{METHOD_NAMES[run.method]} K={run.drafts_per_round}: acceptance length "
            f"{counts.length:.2f} "
            f"over {counts.rounds} rounds; accepted at position 1, 2, ...: {rates(counts)}"
        )
    return "\n".join(lines)
