"""`peagle-bench replicas`: its options, and its tables."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import RESULTS, Command, Options, list_of_positive, option
from peagle_jax.errors import ConfigError

_PROJECTED = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    rows: tuple[Path, ...] = option(
        "files with rows of decode-step, of one GPU and of several",
        default=(RESULTS / "parallel.jsonl",), type=Path, nargs="+", metavar="FILE.jsonl",
    )  # fmt: skip
    gpus: tuple[int, ...] = option(
        "numbers of GPUs: 1, 2, 4 or 8", default=(1, 2, 4, 8), type=list_of_positive, metavar="N,N"
    )

    def check(self) -> None:
        if unknown := sorted(set(self.gpus) - set(_PROJECTED)):
            raise ConfigError(f"--gpus {unknown[0]}: there are formulas for 1, 2, 4 and 8 GPUs")


def run(options: ReplicaOptions) -> int:
    from bench import replicas, rows
    from peagle_jax.cli import runs

    for group in replicas.groups(rows.read(options.rows)):
        print(replicas.heading(group).replace("**", ""))
        table = replicas.table(group, options.gpus)
        print(runs.table(table.header, table.lines))
        for reason in dict.fromkeys(table.left_out.values()):
            names = [name for name, why in table.left_out.items() if why == reason]
            print(f"left out: {', '.join(names)}: {reason}")
        print()
    print(replicas.NOTE)
    return 0


COMMAND = Command(
    name="replicas",
    summary="milliseconds per round by layout of 2, 4 and 8 GPUs: replicas, or one engine over all",
    examples=("replicas", "replicas --gpus 4 --rows bench/results/parallel.jsonl"),
    description="""
Compares layouts of the same GPUs at equal total load: replicas share the sequences, an engine over several GPUs
(--tensor-parallel) has all of them. The layout with the shortest round has the most tokens per second. Nothing is
run: times without a mark are rows that decode-step measured, computed ones lie between them, and projected
ones follow from formulas for more GPUs than were measured (docs/replicas.md). Rows: decode-step with the same
options and --tensor-parallel 1 (with --profile) and 2, at three concurrencies or more.
""",
    options=ReplicaOptions,
    run=run,
)
