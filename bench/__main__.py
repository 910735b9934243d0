"""`peagle-bench`: measurements, a row of a file each."""

import sys

from bench.command import Program

PROGRAM = Program(
    name="peagle-bench",
    package="bench",
    about="""\
Measures speed, acceptance and correctness. Every measurement appends a row (a JSON line with
device, versions, commit and command) to a file in bench/results.

A round is one pass of the target, which checks the drafts, and one draft of the head. K is the
number of drafts per round, AL (acceptance length) the number of tokens per round, concurrency the
number of requests at once. docs/algorithm.md has a glossary. A first try, on a CPU:

  peagle-bench acceptance --sets HumanEval --num-prompts 4 -K 7 --max-tokens 64 --out rows.jsonl
""",
    commands={
        "acceptance": "acceptance length and rate per drafted position, by head, K and prompt set",
        "throughput": "tokens per second of plain decoding, EAGLE-3 and P-EAGLE",
        "decode-step": "rounds of full-size models with random weights",
        "lossless": "greedy output with and without speculation, compared token by token",
        "serve-load": "load on a server of a full-size model, and on its bare engine",
    },
    extras={"serve-load": "serve"},
    removed=dict.fromkeys(
        ("batch", "hostile", "kernels", "matrix", "report"), "`python -m lab` has it"
    )
    | {"humaneval": "lm-evaluation-harness measures a server (docs/serving.md)"}
    | dict.fromkeys(
        (
            *("ablations", "choose-k", "conversion", "headroom", "load-times", "prefix-cache"),
            *("prompt-ends", "reliability", "replicas", "sizes", "structured", "train-step"),
        ),
        "its question is answered; lab/log.md has the results",
    ),
)
main = PROGRAM.main


if __name__ == "__main__":
    sys.exit(main())
