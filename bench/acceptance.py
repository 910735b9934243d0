"""`peagle-bench acceptance`: acceptance length and per-position rates of each head, K and prompt set."""

from tqdm import tqdm

from bench import rows
from bench.sweep import Models, engines, prompt_set, sampling
from bench.timing import drive
from peagle_jax.config import EngineConfig


def acceptance(args, environment: dict) -> list[dict]:
    """Measures, appends a row each to `args.out`, and returns the rows."""
    models = Models.load(args)
    sets = [
        prompt_set(spec, models.tokenizer, prompt_tokens=args.prompt_tokens, limit=args.num_prompts)
        for spec in args.sets
    ]
    params = sampling(args)
    concurrency = min(args.concurrency, max(len(prompts) for _, prompts in sets))
    config = EngineConfig(max_num_seqs=concurrency, max_model_len=args.max_model_len)
    chosen = [(name, *models.runnable(name, prompts, params, config)) for name, prompts in sets]
    done = []
    num_prompts = sum(len(prompts) for _, prompts, _ in chosen)
    with tqdm(total=num_prompts * len(models.variants(args)), unit="prompt", disable=None) as bar:
        for method, num_draft, engine in engines(models, args, config):
            for name, prompts, left_out in chosen:
                bar.set_description(f"{method} K={num_draft} {name}")
                measured = drive(
                    engine, prompts, params, concurrency=concurrency, on_finished=bar.update
                )
                row = {
                    "kind": "acceptance",
                    **models.identity(
                        args, prompts=name, variant=(method, num_draft), concurrency=concurrency
                    ),
                    **measured.as_row(),
                    "prompts_left_out": left_out,
                    **environment,
                }
                done.append(rows.rounded(row))
                rows.append(args.out, done[-1])
    return done
