"""`peagle-bench prefix-cache`: what cached prefixes save."""

import itertools
import statistics
from collections.abc import Sequence

import jax.numpy as jnp
from tqdm import tqdm

from bench import rows
from bench.commands.prefix_cache import Options
from bench.decode_step import CellsConfig
from bench.lossless import Subject, Variant, subject_of
from bench.timing import Measurement, drive
from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.request import Request
from peagle_jax.sampling_params import SamplingParams

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
    with tqdm(total=2 * options.chats * len(variants), unit="text", disable=None) as bar:
        for variant in variants:
            bar.set_description(f"{variant[0]} K={variant[1]}")
            engine = subject.engine(variant, config, jnp.zeros((1, 1), jnp.int32))
            engine.warm_up()
            # The first calls allocate memory.
            drive(engine, [texts[0][:8]] * options.concurrency, _params(8), concurrency=8)
            row = {
                "kind": "prefix-cache",
                "model": subject.name,
                "dtype": subject.dtype,
                "weights": subject.weights,
                "kv_cache_dtype": config.kv_cache_dtype,
                "layers": subject.target.config.num_layers,
                "set": subject.set,
                "method": variant[0],
                "num_speculative_tokens": variant[1],
                "temperature": 0.0,
                **{name: getattr(options, name) for name in _SIZES},
                **_second_turns(options, engine, texts, bar),
                **_shared_beginning(options, engine, texts, bar),
                **environment,
            }
            done.append(rows.rounded(row))
            rows.append(options.out, done[-1])
            del engine
    return done


_SIZES = (
    "chats", "chat_tokens", "turn_tokens", "concurrency", "max_tokens", "page_size", "prefill_chunk",
    "prefill_rows",
)  # fmt: skip


def _params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def _config(options: Options) -> CellsConfig:
    longest = options.chat_tokens + options.turn_tokens + 2 * options.max_tokens
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
    size = options.chat_tokens + options.turn_tokens
    made = []
    for chat in range(options.chats + 1):
        joined = itertools.chain.from_iterable(itertools.cycle(pieces[chat:] + pieces[:chat]))
        made.append(list(itertools.islice(joined, size)))
    return made


def _second_turns(options: Options, engine: Engine, texts, bar: tqdm) -> dict:
    """One chat at a time, so that its slot still holds the windows of its first turn."""
    first: dict[bool, list[Request]] = {True: [], False: []}
    for text in texts[1:]:
        one = lambda prompt, reads: drive(
            engine, [prompt], _params(options.max_tokens), concurrency=1, reads_prefix_cache=reads
        ).requests[0]
        chat = text[: options.chat_tokens]
        turn = chat + one(chat, False).output + text[options.chat_tokens :]
        for reads in (True, False):
            first[reads].append(one(turn, reads))
        bar.update()
    return _compare("turn", first[True], first[False])


def _shared_beginning(options: Options, engine: Engine, texts, bar: tqdm) -> dict:
    beginning = texts[0][: options.chat_tokens]
    prompts = [beginning + text[options.chat_tokens :] for text in texts[1:]]
    params = _params(options.max_tokens)
    drive(engine, [texts[0]], params, concurrency=1)  # caches the beginning
    run = lambda reads: drive(
        engine, prompts, params, concurrency=options.concurrency, reads_prefix_cache=reads
    )
    warm, cold = run(True), run(False)
    bar.update(len(prompts))
    return _compare("shared", warm.requests, cold.requests) | {
        "shared_tokens_per_second_warm": _speed(warm),
        "shared_tokens_per_second_cold": _speed(cold),
    }


def _speed(run: Measurement) -> float:
    return sum(map(len, run.outputs)) / run.seconds


def _compare(name: str, warm: Sequence[Request], cold: Sequence[Request]) -> dict:
    ttft = lambda some: 1e3 * statistics.median(r.first_token_time - r.arrival_time for r in some)
    num_cached = sum(request.num_cached for request in warm)
    pairs = zip(warm, cold, strict=True)
    return {
        f"{name}_ttft_ms_warm": ttft(warm),
        f"{name}_ttft_ms_cold": ttft(cold),
        f"{name}_cached_share": num_cached / sum(len(request.prompt) for request in warm),
        f"{name}_texts_equal": sum(one.output == other.output for one, other in pairs),
    }
