"""`peagle-bench structured`: rounds with and without a JSON schema, and the masks of a round alone."""

import statistics
import time
from collections.abc import Sequence

from bench import rows
from bench.cells import CellsConfig
from bench.commands.structured import Options
from bench.host_round import Clock
from bench.progress import progress_bar, warm_up
from bench.sweep import Models
from peagle_jax.cli import runs
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host import calls
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.engine.structured.grammar import Matcher, masks_of
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.structured import Structured


def _closed(**properties: dict) -> dict:
    """An object that has these properties and no others."""
    fields = dict(properties=properties, required=list(properties), additionalProperties=False)
    return {"type": "object", **fields}


_WORD, _COUNT = {"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0}
SCHEMAS = (
    _closed(first_name=_WORD, last_name=_WORD, age=_COUNT),
    _closed(city=_WORD, temperature={"type": "number"}, unit={"enum": ["celsius", "fahrenheit"]}),
    _closed(items={"type": "array", "items": _closed(product=_WORD, quantity=_COUNT), "minItems": 2, "maxItems": 4}),
    _closed(function={"const": "get_current_weather"}, arguments=_closed(location=_WORD, days=_COUNT)),
    _closed(date={"type": "string", "format": "date"}, is_public_holiday={"type": "boolean"}),
    {"type": "array", "items": {"enum": ["low", "medium", "high"]}, "minItems": 3, "maxItems": 6},
)  # fmt: skip
_PROMPT = "value = json.loads("
ENDS = {"a flag and a choice": _closed(ok={"type": "boolean"}, kind={"enum": ["a", "b"]}), "a person": SCHEMAS[0], "a list of items": SCHEMAS[2]}  # fmt: skip
_SPACES = {"by default": None, "without bound": "[ \\n\\r\\t]*"}
MODES = ("free", "masks", "forced")


class _Unforced(Matcher):
    """A matcher whose forced tokens are not drafted."""

    def forced(self, most: int) -> list[int]:
        return []


def structured(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows."""
    models = Models.load(options)
    done = []
    for method, num_draft in models.variants(options):
        config = CellsConfig(
            concurrencies=options.concurrency,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
        )
        engine = models.engine(method, num_draft, config)
        title = f"{method} K={num_draft}"
        warm_up(engine, title)
        runs.first_rounds(engine)
        engine.grammars.prepare()
        cells = [(mode, size) for size in options.concurrency for mode in MODES]
        for mode, size in progress_bar(iterable=cells, desc=title, unit="row"):
            # Not timed: the first rounds of a batch size are slower.
            _write(engine, "free", size, options)
            row = dict(kind="structured", model=models.name, method=method, num_draft=num_draft)
            row |= dict(mode=mode, concurrency=size, max_tokens=options.max_tokens)
            row |= _write(engine, mode, size, options)
            row["us_parts"] = _parts(engine, mode, size, options)
            if mode != "free":
                row |= _masks(engine, size, num_draft)
            done.append(rows.rounded(row | environment))
            rows.append(options.out, done[-1])
    return done


def ends(options: Options, environment: dict) -> list[dict]:
    """Counts the texts of `ENDS` that `max_tokens` ends; appends a row each to `options.out`, and returns the rows."""
    models, done = Models.load(options), []
    size = max(options.concurrency)
    config = CellsConfig(
        concurrencies=(size,), max_num_seqs=size, max_model_len=options.max_model_len
    )
    for method, num_draft in models.variants(options):
        engine = models.engine(method, num_draft, config)
        warm_up(engine, f"{method} K={num_draft}")
        for name, schema in ENDS.items():
            for temperature in (0.0, 1.0):
                for spaces, pattern in _SPACES.items():
                    constraint = Structured.json_schema(schema, pattern)
                    row = dict(kind="structured-ends", model=models.name, method=method)
                    row |= dict(num_draft=num_draft, schema=name, temperature=temperature)
                    row |= dict(spaces=spaces, max_tokens=options.max_tokens, texts=options.samples)
                    row |= _ends(engine, constraint, temperature, options)
                    done.append(row | environment)
                    rows.append(options.out, done[-1])
    return done


def _ends(engine: Engine, constraint: Structured, temperature: float, options: Options) -> dict:
    """Texts that `max_tokens` ended, of `options.samples` prompts and seeds."""
    params = [
        SamplingParams(
            max_tokens=options.max_tokens, temperature=temperature, seed=seed, structured=constraint
        )
        for seed in range(options.samples)
    ]
    prompts = [f"record_{number} = json.loads(" for number in range(options.samples)]
    texts = engine.generate(prompts, params)
    return dict(
        cut=sum(one.finish_reason == "length" for one in texts),
        tokens=sum(len(one.tokens) for one in texts),
    )


def ends_table(some: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and lines."""
    names = ("method", "num_draft", "schema", "temperature", "spaces", "texts", "cut")
    return list(names), [[str(row[name]) for name in names] for row in some]


def _write(engine: Engine, mode: str, size: int, options: Options) -> dict:
    """Writes all schemas, `size` requests at once."""
    schemas = [*SCHEMAS] * options.repeats
    # As many as fill the batch to the end.
    schemas = (schemas * size)[: max(len(schemas) // size, 1) * size]
    requests: list[Request] = []
    for start in range(0, len(schemas), size):
        requests += [
            _add(engine, schema, mode, options) for schema in schemas[start : start + size]
        ]
        while engine.has_work:
            engine.step()
    decoding = sum(r.finish_time - r.first_token_time for r in requests)
    counts = Acceptance.of(requests)
    return dict(
        texts=len(requests),
        tokens=sum(len(r.output) for r in requests),
        complete=sum(r.finish_reason == "stop" for r in requests),
        rounds=counts.rounds,
        ms_per_round=1e3 * decoding / max(1, counts.rounds),
        acceptance_length=counts.length,
    )  # fmt: skip


def _parts(engine: Engine, mode: str, size: int, options: Options) -> dict[str, float]:
    """Microseconds of a round by part of the host's work, as in `host_round`; "fetch" waits for the device.

    In a run of its own, because the clock takes a few microseconds. Calls that read prompts are included.
    """
    clock = Clock(is_on=True)
    clock.watch_engine(engine)
    clock.watch(calls, "masks_of", "masks")  # a part of "schedule"
    clock.watch(Matcher, "consume", "consume")  # a part of "commit"
    try:
        rounds = _write(engine, mode, size, options)["rounds"] / size
    finally:
        clock.restore()
    return {part: 1e6 * spent / rounds for part, spent in clock.seconds.items()}


def _add(engine: Engine, schema: dict, mode: str, options: Options) -> Request:
    if mode == "free":
        params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
        return engine.add_request(_PROMPT, params)
    constraint = Structured.json_schema(schema)
    matcher = engine.grammars.compile(constraint)
    if mode == "masks":
        matcher = _Unforced(matcher.matcher, matcher.threads, matcher.eos_ids, matcher.num_words)
    params = SamplingParams(max_tokens=options.max_tokens, structured=constraint)
    return engine.add_request(_PROMPT, params, matcher=matcher)


def _masks(engine: Engine, size: int, num_draft: int) -> dict:
    """Times the masks of a round, along texts of the schemas, and the compilation of a schema."""
    compiled, masks = [], []
    texts = [_text(engine, schema) for schema in SCHEMAS]
    for place in range(0, min(map(len, texts)) - num_draft):
        windows = []
        for row in range(size):
            text = texts[row % len(texts)]
            before = time.perf_counter()
            matcher = engine.grammars.compile(Structured.json_schema(SCHEMAS[row % len(texts)]))
            compiled.append(1e3 * (time.perf_counter() - before))
            matcher.consume(text[:place])
            windows.append((matcher, text[place : place + num_draft]))
        before = time.perf_counter()
        masks_of(windows, size=size, height=num_draft + 1)
        masks.append(1e3 * (time.perf_counter() - before))
    return dict(
        vocab_size=engine.target_config.vocab_size,
        masks_ms=_median(masks),
        masks_ms_max=max(masks, default=0.0),
        compile_ms=_median(compiled),
    )


def _text(engine: Engine, schema: dict) -> list[int]:
    """Token ids of a text that the model writes under a schema."""
    params = SamplingParams(max_tokens=48, structured=Structured.json_schema(schema))
    (completion,) = engine.generate([_PROMPT], params)
    return completion.tokens


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def table(some: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and lines."""
    header = ["method", "K", "requests", "mode", "ms/round", "AL", "tokens", "complete"]
    header += ["masks, ms", "compile, ms"]
    number = lambda row, name: f"{row[name]:.2f}" if name in row else ""
    lines = [
        [
            row["method"],
            str(row["num_draft"]),
            str(row["concurrency"]),
            row["mode"],
            number(row, "ms_per_round"),
            number(row, "acceptance_length"),
            str(row["tokens"]),
            f"{row['complete']}/{row['texts']}",
            number(row, "masks_ms"),
            number(row, "compile_ms"),
        ]
        for row in some
    ]
    return header, lines
