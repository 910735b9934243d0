"""`peagle-bench throughput`: tokens per second of the three methods, over concurrency and K, in one run."""

import itertools
from dataclasses import replace

from tqdm import tqdm

from bench import roofline, rows
from bench.commands.throughput import Options
from bench.sweep import Models, engines, prompt_set, sampling
from bench.timing import drive
from peagle_jax.config import EngineConfig

_WARM_UP_TOKENS = 16


def _num_prompts(options: Options, concurrency: int) -> int:
    """A multiple of the concurrency, so that the batch stays full until near the end."""
    return max(options.min_prompts, options.prompts_per_slot * concurrency)


def throughput(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows."""
    models = Models.load(options)
    name, pool = prompt_set(
        options.set, models.tokenizer, prompt_tokens=options.prompt_tokens, limit=None
    )
    params = sampling(options)
    short = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
    config = EngineConfig(
        max_num_seqs=max(options.concurrency),
        max_model_len=options.max_model_len,
        prefill_rows=options.prefill_rows,
    )
    pool, left_out = models.runnable(name, pool, params, config)
    plain: dict[int, tuple[float, list]] = {}  # concurrency -> tokens/s and outputs
    done = []
    total = sum(_num_prompts(options, c) for c in options.concurrency) * len(
        models.variants(options)
    )
    with tqdm(total=total, unit="prompt", disable=None) as bar:
        for method, num_draft, engine in engines(models, options, config):
            for concurrency in options.concurrency:
                bar.set_description(f"{method} K={num_draft} x{concurrency}")
                count = _num_prompts(options, concurrency)
                prompts = list(itertools.islice(itertools.cycle(pool), count))
                # The first rounds of a batch size pay for what later ones find in place.
                drive(engine, prompts[:concurrency], short, concurrency=concurrency)
                measured = drive(
                    engine, prompts, params, concurrency=concurrency, on_finished=bar.update
                )
                row = {
                    "kind": "throughput",
                    **models.identity(
                        options, prompts=name, variant=(method, num_draft), concurrency=concurrency
                    ),
                    **measured.as_row(),
                    "prompts_left_out": left_out,
                }
                speed = row["tokens_per_second"]
                if method == "none":
                    plain[concurrency] = speed, measured.outputs
                if concurrency in plain:
                    base, outputs = plain[concurrency]
                    pairs = zip(outputs, measured.outputs, strict=True)
                    row["ratio_to_plain"] = speed / base
                    row["outputs_equal_to_plain"] = sum(a == b for a, b in pairs)
                row |= environment
                row |= roofline.fraction(row, engine.target_config, engine.drafter_config)
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    return done
