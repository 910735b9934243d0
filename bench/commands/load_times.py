"""`peagle-bench load-times`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowFileOptions, check_preset, option, positive, rows_file
from peagle_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options(RowFileOptions):
    folder: Path = option(
        "new folder, on the disk to measure", positional=True, type=Path, metavar="DIR"
    )
    preset: str = option(
        "model to imitate; -fp8 behind its name: in fp8",
        default="qwen3-coder-30b-a3b-fp8",
        metavar="NAME",
    )
    layers: int | None = option("the first N layers only", default=None, type=positive, metavar="N")
    tensor_parallel: int = option(
        "devices that share the model", default=1, type=positive, metavar="N"
    )
    verify: bool = option("compare every bit of the model with the files", default=False)
    out: Path = rows_file("load_times.jsonl")

    def check(self) -> None:
        check_preset(self.preset)
        if self.verify and self.tensor_parallel > 1:
            raise ConfigError("--verify compares whole parameters; drop --tensor-parallel")


def run(options: Options) -> int:
    from bench.load_times import load_times

    for row in load_times(options):
        print(*(f"{name}: {value}" for name, value in row.items()), "", sep="\n")
    return 0


COMMAND = Command(
    name="load-times",
    summary="weights from disk onto the device, beside a plain read of the same files",
    examples=("load-times /data/new --preset gpt-oss-20b --layers 4",),
    description="""
Writes a checkpoint with a real model's names, shapes and dtypes and random bytes. One thread reads the files and
forgets the bytes; then new processes load the model: each first from the disk, then from the page cache. The folder
is deleted at the end.
""",
    options=Options,
    run=run,
    removed={"--converted": "it has never been measured; leave it out"},
)
