"""`peagle-bench acceptance`: acceptance length and per-position rates of each head, K and prompt set."""

from tqdm import tqdm

from bench import rows
from bench.commands.acceptance import Options
from bench.sweep import Models, check_rounds, engines, prompt_set, sampling
from bench.timing import drive
from peagle_jax.config import EngineConfig


def acceptance(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows."""
    models = Models.load(options)
    sets = [
        prompt_set(
            spec,
            models.tokenizer,
            prompt_tokens=options.prompt_tokens,
            limit=options.num_prompts,
            chat=models.uses_chat(options),
        )
        for spec in options.sets
    ]
    params = sampling(options)
    concurrency = min(options.concurrency, max(len(prompts) for _, prompts in sets))
    sizes = dict(max_num_seqs=concurrency, max_model_len=options.max_model_len)
    config = EngineConfig(**sizes, **options.drafting())
    chosen = [(name, *models.runnable(name, prompts, params, config)) for name, prompts in sets]
    done = []
    num_prompts = sum(len(prompts) for _, prompts, _ in chosen)
    with tqdm(
        total=num_prompts * len(models.variants(options)), unit="prompt", disable=None
    ) as bar:
        for method, num_draft, engine in engines(models, options, config):
            for name, prompts, left_out in chosen:
                bar.set_description(f"{method} K={num_draft} {name}")
                measured = drive(
                    engine, prompts, params, concurrency=concurrency, on_finished=bar.update
                )
                row = {
                    **options.drafting_row("acceptance"),
                    **models.identity(
                        options, prompts=name, variant=(method, num_draft), concurrency=concurrency
                    ),
                    **measured.as_row(),
                    "prompts_left_out": left_out,
                    **environment,
                }
                check_rounds(row)
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    return done
