"""`peagle-bench acceptance`: acceptance length and rates by position, head, K and prompt set."""

from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from bench import rows
from bench.command import METHODS, REMOVED, RESULTS, Command, SweepOptions, exit_code, methods
from bench.models import Models
from bench.printed import show
from bench.sweep import check_rounds, engines, prompts_of, sampling
from bench.timing import drive
from peagle_jax.config import EngineConfig
from peagle_jax.structured import Structured
from peagle_jax.text.prompts import read_text


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    """Options of this command.

    Args:
      sets: prompts: HumanEval, MT-Bench, or NAME=FILE (JSON lines, a text file, a folder of *.py)
      num_prompts: prompts per set; all without it
      json_schema: answers match the JSON schema of this file, which names the set in rows
      concurrency: requests at once
    """

    methods: tuple[str, ...] = methods(METHODS[1:])
    sets: tuple[str, ...] = ("HumanEval", "MT-Bench")
    num_prompts: int | None = None
    json_schema: Path | None = None
    concurrency: int = 8
    out: Path = RESULTS / "acceptance.jsonl"


def run(options: Options) -> int:
    """Measures, a row each, and prints them."""
    params, suffix = sampling(options), ""
    if file := options.json_schema:
        params = replace(params, structured=Structured.json_schema(read_text(file)))
        suffix = f" as {file.stem}"
    environment, models = options.environment(), Models.load(options)
    config = EngineConfig(
        max_num_seqs=options.concurrency,
        max_model_len=options.max_model_len,
        programs_folder=options.programs_folder,
    )
    chosen = [prompts_of(models, options, one, config, options.num_prompts) for one in options.sets]
    concurrency = min(options.concurrency, max(len(prompts) for _, prompts, _ in chosen))
    config = replace(config, max_num_seqs=concurrency)
    total = sum(len(prompts) for _, prompts, _ in chosen) * len(models.variants(options))
    done = []
    with tqdm(total=total, unit="prompt", disable=None) as bar:
        for variant, engine in engines(models, options, config):
            for name, prompts, left_out in chosen:
                bar.set_description(f"{variant} {name}")
                measured = drive(
                    engine, prompts, params, concurrency=concurrency, on_finished=bar.update
                )
                row = {
                    "kind": "acceptance",
                    **models.identity(
                        options, prompts=name + suffix, variant=variant, concurrency=concurrency
                    ),
                    **measured.as_row(),
                    "prompts_left_out": left_out,
                    **environment,
                }
                check_rounds(row)
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    show("sweep", done, options.out)
    return exit_code(sum(row["prompts_left_out"] for row in done))


COMMAND = Command(
    examples=("acceptance --sets HumanEval --num-prompts 20 -K 3,7",),
    description="""
Decodes prompt sets with each head and each K (drafts per round). A row has the acceptance length
(AL, tokens per round) and, for each drafted position, the share of rounds in which the draft became
output. Acceptance depends on the text, not on the device, so a CPU is enough.
""",
    options=Options,
    run=run,
    removed=REMOVED,
)
