"""`peagle-bench prefix-cache`: what cached prefixes save."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from bench import rows
from bench.cells import CellsConfig
from bench.commands.prefix_cache import Options
from bench.lossless import Subject, Variant, subject_of, text_table
from bench.page_bits import WrittenPages, written_twice
from bench.progress import progress_bar, warm_up
from bench.timing import Measurement, drive
from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.sampling_params import SamplingParams

_NUM_WRITTEN = 4  # texts whose pages are compared
_MOST_PLACES = 20  # differences that a row lists
_PIECES = 256  # prompts of the set that texts are joined from


def prefix_cache(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row for each method and K to `options.out`, and returns the rows.

    Raises:
      ConfigError: the texts are longer than the model's context.
    """
    subject = subject_of(options)
    config = _config(options)
    most = subject.target.config.max_position
    if config.max_model_len > most:
        raise ConfigError(
            f"{subject.name} has {most} positions, and the texts need {config.max_model_len}: "
            "lower --chat-tokens"
        )
    texts = _texts(options, subject)
    plain = [("none", 0)] if "none" in options.methods else []
    variants: list[Variant] = plain + [(m, k) for m in subject.heads for k in options.k]
    done = []
    plain_pages: WrittenPages | None = None
    known: list[list[int]] = [[0]]  # texts of plain decoding, from which an `Oracle` drafts
    total = (options.chats + options.requests) * len(variants)
    with progress_bar(total=total, unit="text") as bar:
        for variant in variants:
            bar.set_description(title := f"{variant[0]} K={variant[1]}")
            engine = subject.engine(variant, config, text_table(known, config))
            warm_up(engine, title)
            # The first calls allocate memory.
            drive(engine, [texts[0][:8]] * options.concurrency, _params(8), concurrency=8)
            by_rounds, by_prefill = written_twice(
                engine, _first_turns(options, texts), options.max_tokens
            )
            turns = _second_turns(options, engine, texts, bar)
            shared = _shared_beginning(options, engine, texts, bar)
            requests = [*turns.cold, *shared.cold]
            if variant[0] == "none":
                plain_pages = by_rounds
                known = [*by_rounds.tokens, *(request.tokens for request in requests)]
            row = {
                "kind": "prefix-cache",
                "model": subject.name,
                "dtype": subject.dtype,
                "weights": subject.weights,
                "activations": subject.activations,
                "kv_cache_dtype": config.kv_cache_dtype,
                "layers": subject.target.config.num_layers,
                "set": subject.set,
                "method": variant[0],
                "num_speculative_tokens": variant[1],
                "temperature": 0.0,
                **{name: getattr(options, name) for name in _SIZES},
                "acceptance_length": Acceptance.of(requests).length,
                **turns.as_row("turn"),
                **shared.as_row("shared"),
                **_compare_pages(by_rounds, by_prefill, plain_pages),
                **environment,
            }
            done.append(rows.rounded(row))
            rows.append(options.out, done[-1])
            del engine
    return done


_SIZES = (
    "chats", "chat_tokens", "turn_tokens", "requests", "shared_tokens", "concurrency", "max_tokens",
    "page_size", "prefill_chunk", "prefill_rows",
)  # fmt: skip


def _params(count: int) -> SamplingParams:
    # One seed for all: a random head draws by request which drafts are right.
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=0)


def _compare_pages(rounds: WrittenPages, prefill: WrittenPages, plain: WrittenPages | None) -> dict:
    """Counts of pages that differ, and the first of them. Pages of plain decoding are compared if its texts are
    the same."""
    same_texts = plain is not None and plain.tokens == rounds.tokens
    differing = rounds.differing(prefill)
    return {
        "pages_compared": len(rounds.pages),
        "pages_differing": len(differing),
        "pages_differing_at": differing[:_MOST_PLACES],
        "plain_pages_compared": rounds.count("target") if same_texts else 0,
        "plain_pages_differing": len(rounds.differing(plain)) if same_texts else None,
    }


def _first_turns(options: Options, texts: list[list[int]]) -> list[list[int]]:
    """Beginnings of a few texts, for a round of the batch size `--concurrency`."""
    return [text[: options.turn_tokens] for text in texts[: min(options.concurrency, _NUM_WRITTEN)]]


def _config(options: Options) -> CellsConfig:
    longest = max(options.chat_tokens, options.shared_tokens) + options.turn_tokens
    longest += 2 * options.max_tokens
    longest += 2 * max(options.k) + 1
    return CellsConfig(
        concurrencies=tuple({1, options.concurrency}),
        max_num_seqs=options.concurrency,
        max_model_len=-(-longest // options.page_size) * options.page_size,
        page_size=options.page_size,
        prefill_chunk=options.prefill_chunk,
        prefill_rows=min(options.prefill_rows, options.concurrency),
        prefix_caching=True,
    )


def _texts(options: Options, subject: Subject) -> list[list[int]]:
    """A different text for each chat, of `--chat-tokens` and `--turn-tokens` tokens, from prompts in turn."""
    pieces = subject.prompts(_PIECES)
    size = max(options.chat_tokens, options.shared_tokens) + options.turn_tokens
    made = []
    for chat in range(max(options.chats, options.requests) + 1):
        joined = itertools.chain.from_iterable(itertools.cycle(pieces[chat:] + pieces[:chat]))
        made.append(list(itertools.islice(joined, size)))
    return made


@dataclass(frozen=True)
class Compared:
    """The same prompts, with and without what the prefix cache has."""

    warm: list[Request]
    cold: list[Request]
    seconds_warm: float
    seconds_cold: float

    def as_row(self, name: str) -> dict:
        ttft = lambda some: (
            1e3 * statistics.median(r.first_token_time - r.arrival_time for r in some)
        )
        speed = lambda some, seconds: sum(len(r.output) for r in some) / seconds
        num_cached = sum(request.num_cached for request in self.warm)
        pairs = zip(self.warm, self.cold, strict=True)
        return {
            f"{name}_ttft_ms_warm": ttft(self.warm),
            f"{name}_ttft_ms_cold": ttft(self.cold),
            f"{name}_cached_share": num_cached / sum(len(request.prompt) for request in self.warm),
            f"{name}_texts_equal": sum(one.output == other.output for one, other in pairs),
            f"{name}_tokens_per_second_warm": speed(self.warm, self.seconds_warm),
            f"{name}_tokens_per_second_cold": speed(self.cold, self.seconds_cold),
        }


def _second_turns(options: Options, engine: Engine, texts, bar: tqdm) -> Compared:
    """One chat at a time, so that its slot still holds the windows of its first turn."""
    runs: dict[bool, list[Measurement]] = {True: [], False: []}
    for text in texts[1 : options.chats + 1]:
        one = lambda prompt, reads: drive(
            engine, [prompt], _params(options.max_tokens), concurrency=1, reads_prefix_cache=reads
        )
        chat = text[: options.chat_tokens]
        (answer,) = one(chat, False).outputs
        turn = chat + answer + text[-options.turn_tokens :]
        for reads in (True, False):
            runs[reads].append(one(turn, reads))
        bar.update()
    return _compared(runs[True], runs[False])


def _shared_beginning(options: Options, engine: Engine, texts, bar: tqdm) -> Compared:
    beginning = texts[0][: options.shared_tokens]
    own = (text[-options.turn_tokens :] for text in texts[1 : options.requests + 1])
    prompts = [beginning + text for text in own]
    params = _params(options.max_tokens)
    drive(engine, [texts[0]], params, concurrency=1)  # caches the beginning
    run = lambda reads: drive(
        engine, prompts, params, concurrency=options.concurrency, reads_prefix_cache=reads
    )
    warm, cold = run(True), run(False)
    bar.update(len(prompts))
    return _compared([warm], [cold])


def _compared(warm: Sequence[Measurement], cold: Sequence[Measurement]) -> Compared:
    requests = lambda runs: [request for run in runs for request in run.requests]
    seconds = lambda runs: sum(run.seconds for run in runs)
    return Compared(requests(warm), requests(cold), seconds(warm), seconds(cold))
