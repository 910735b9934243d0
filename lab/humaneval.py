"""`python -m lab humaneval`: problems of HumanEval that a model solves (arXiv 2107.03374)."""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from bench import rows
from bench.command import Command, SweepOptions, methods, option, show
from bench.models import Models
from bench.rows import DATA
from bench.sweep import engines, sampling
from lab import sandbox
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.host.completion import Completion

_FILE = DATA / "HumanEval.jsonl"
# Section 2.1 of the paper; a newline and no space after it end the function.
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nimport", "\nfrom")
_GRAM = 8  # tokens


@dataclass(frozen=True)
class Problem:
    """A function to complete.

    Attributes:
      prompt: imports, signature and docstring, without the newline at its end: a tokenizer merges
        that with the indentation that follows.
      test: source that defines `check`.
      entry_point: name of the function.
    """

    name: str
    prompt: str
    test: str
    entry_point: str

    def program(self, completion: str) -> str:
        """The source that ends without an exception if the completion is right."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


def problems(file: Path = _FILE, limit: int | None = None) -> list[Problem]:
    """Reads the released file."""
    return [
        Problem(row["task_id"], row["prompt"].rstrip(), row["test"], row["entry_point"])
        for row in rows.read([file])[:limit]
    ]


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Probability that one of k samples is right, without bias: equation 1 of the paper."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """Share of the 8-grams of tokens that stood in the same text before."""
    seen = total = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    """Options of this command.

    Args:
      samples: samples of each problem
      num_prompts: number of problems; all 164 without it
      concurrency: requests at once
      seed: seed of the first sample
    """

    methods: tuple[str, ...] = methods(("peagle",))
    k: tuple[int, ...] = (7,)
    samples: int = 20
    num_prompts: int | None = None
    concurrency: int = 16
    max_tokens: int = 256
    temperature: float = 0.2
    top_p: float = 0.95
    seed: int = option(0, type=int)
    out: Path = Path("humaneval.jsonl")

    def check(self) -> None:
        super().check()
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError("greedy samples are all equal; add --samples 1 or a --temperature")


def run(options: Options) -> int:
    """Completes and checks, a row for each method and K, and prints them."""
    done = humaneval(options, options.environment())
    header = ["method", "K", "T", "samples", "pass@1", "pass@10", "solved", "empty", "repeated"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            f"{row['temperature']:g}",
            str(row["samples"]),
            f"{row['pass@1']:.1%}",
            f"{row['pass@10']:.1%}" if "pass@10" in row else "",
            f"{row['solved']} of {row['problems']}",
            f"{row['empty']:.1%}",
            f"{row['repeated_8grams']:.1%}",
        ]
        for row in done
    ]
    show(header, lines, options.out)
    return 0


def humaneval(options: Options, environment: dict) -> list[dict]:
    """Completes and checks, appends a row for each method and K to `options.out`, and returns the
    rows.

    Raises:
      ConfigError: this machine cannot confine programs, or the model has no tokenizer.
    """
    sandbox.check_supported()
    models = Models.load(options)
    if models.tokenizer is None:
        raise ConfigError("HumanEval is text; the model has no tokenizer")
    chosen = problems(limit=options.num_prompts)
    base = replace(sampling(options), top_p=options.top_p, stop=STOP)
    texts = [problem.prompt for problem in chosen for _ in range(options.samples)]
    params = [replace(base, seed=options.seed + i) for i in range(len(texts))]
    config = EngineConfig(
        max_num_seqs=min(options.concurrency, len(texts)),
        max_model_len=options.max_model_len,
        programs_folder=options.programs_folder,
    )
    done = []
    for method, num_draft, engine in engines(models, options, config):
        with tqdm(
            total=len(texts), unit="text", desc=f"{method} K={num_draft}", disable=None
        ) as bar:
            count = lambda request, tokens, bar=bar: bar.update(request.is_finished)
            completions = engine.generate(texts, params, on_update=count)
        row = {
            "kind": "humaneval",
            **models.identity(
                options,
                prompts="HumanEval",
                variant=(method, num_draft),
                concurrency=config.max_num_seqs,
            ),
            "top_p": options.top_p,
            **judged(chosen, completions, options.samples),
            **environment,
        }
        done.append(rows.rounded(row))
        rows.append(options.out, done[-1])
    return done


def judged(chosen: Sequence[Problem], completions: Sequence[Completion], num_samples: int) -> dict:
    """Runs the completions, `num_samples` of each problem in order, and counts.

    Returns:
      pass@1 and, for at least 10 samples, pass@10; counts by outcome and by kind of error; the
      share of completions without text and of repeated 8-grams.
    """
    programs = [chosen[i // num_samples].program(done.text) for i, done in enumerate(completions)]
    with ThreadPoolExecutor() as pool:  # a thread waits for a process
        running = pool.map(sandbox.run, programs)
        outcomes = list(tqdm(running, total=len(programs), unit="program", disable=None))
    right = [
        sum(one.status == "passed" for one in outcomes[start : start + num_samples])
        for start in range(0, len(outcomes), num_samples)
    ]
    at = [k for k in (1, 10) if k <= num_samples]
    return {
        "problems": len(chosen),
        "samples": num_samples,
        **{f"pass@{k}": sum(pass_at(k, num_samples, c) for c in right) / len(right) for k in at},
        "solved": sum(map(bool, right)),
        "outcomes": dict(Counter(one.status for one in outcomes)),
        "errors": dict(Counter(_kind(one.detail) for one in outcomes if one.detail).most_common(8)),
        "empty": sum(not done.text.strip() for done in completions) / len(completions),
        "repeated_8grams": repeated_share([done.tokens for done in completions]),
    }


def _kind(detail: str) -> str:
    return detail.partition(":")[0]


COMMAND = Command(
    examples=("humaneval --temperature 0 --samples 1", "humaneval --samples 20 --num-prompts 40"),
    description="""
Completes the functions of HumanEval and runs their tests, each in a process without network, files
or other processes, and with limited time and memory (Linux on x86-64 or aarch64). Drafts do not
change the distribution of the text, so one method is enough. A row has pass@1 and pass@10 (the
chance that one, or one of ten, samples passes), how programs ended, the share of completions
without text, and the share of repeated 8-grams of tokens.
""",
    options=Options,
    run=run,
)
