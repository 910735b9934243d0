"""`peagle-bench conversion`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowFileOptions, check_preset, option, positive, rows_file


@dataclass(frozen=True, kw_only=True)
class Options(RowFileOptions):
    folder: Path = option(
        "new folder, on the disk to measure", positional=True, type=Path, metavar="DIR"
    )
    preset: str = option("model to imitate", default="gpt-oss-20b", metavar="NAME")
    quantization: str = option(
        "format of its tensors", default="mxfp4", choices=("none", "fp8", "mxfp4")
    )
    layers: int | None = option("the first N layers only", default=None, type=positive, metavar="N")
    out: Path = rows_file("conversion.jsonl")

    def check(self) -> None:
        check_preset(self.preset)


def run(options: Options) -> int:
    from bench.conversion import conversion

    print(*(f"{name}: {value}" for name, value in conversion(options).items()), sep="\n")
    return 0


COMMAND = Command(
    name="conversion",
    summary="peagle-convert beside a plain copy: gigabytes per second and peak memory",
    examples=("conversion /data/new --preset gpt-oss-20b --layers 4",),
    description="""
Writes a checkpoint with a real model's names, shapes and dtypes and random bytes, copies it, converts it and
verifies the result. Copy and conversion both read from disk, not from the page cache, and end with fsync. The
folder is deleted at the end.
""",
    options=Options,
    run=run,
)
