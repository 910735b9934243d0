"""Compiles kernels for a GPU that is not present and reports resources: `python -m lab.deviceless`.

XLA compiles from a description of the chip (`lab/data/*.txtpb`) to machine code, with the CUDA
plugin and ptxas but without a driver: `pip install -e '.[compile]'`. This checks types, layouts and
resources on that chip; results are checked by the tests in interpret mode.

An operation is included through its module in `lab/specs`:

- `SPECS`: name -> spec, the shapes that models use. A spec may have `max_registers` (default 255),
  and `chips` if not all generations (`pallas_kernels.device.Device.sm`) have its kernel.
- `build(spec)`: a function to jit that requires the kernel, and a tuple of its argument shapes.
- `CHIPS`: those with a kernel of any spec, if not all have one.
- `MMA`: capability -> the matrix instruction that a kernel must contain, a regular expression for
  its beginning such as "wgmma"; may be empty. A spec's own `mma` takes its place.

`--compare` compares with the records in `lab/data/kernels_<chip>.jsonl`: equal PTX instructions
give equal machine code. So a change that only moves code around can be shown to change no kernel.
`--record` replaces the records, after a change that was measured, or with a new version of jax.

A process compiles for one chip only: Mosaic fixes the ptxas target at its first kernel.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import printed_code, specs
from lab.specs import specs_of, specs_on
from pallas_kernels.device import B200, B300, H200, L4, Device

CHIPS = {"h200": H200, "b200": B200, "b300": B300, "l4": L4}
_ROOT = Path(__file__).parents[1]
_MMA = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel as it was compiled, or the `error` of a spec that was not.

    Attributes:
      seconds: tracing, lowering and compiling the spec.
      registers: per thread.
      spills: bytes of register spills that ptxas reports.
      smem: bytes of dynamic shared memory per thread block, without barriers.
      mma: kinds of matrix instructions in the kernel.
      instructions: number of PTX instructions.
      code: SHA-256 of these, the first 16 digits; debug information does not count.
    """

    op: str
    spec: str
    chip: str
    seconds: float
    name: str = ""
    registers: int = 0
    max_registers: int = 255
    spills: int = 0
    smem: int = 0
    mma: tuple[str, ...] = ()
    instructions: int = 0
    code: str = ""
    error: str = ""


def ops() -> list[str]:
    """Operations of the product, and the steps of the lesson (lab/ladder.md)."""
    return [*specs.ops(), "lab.lesson"]


def missing() -> str | None:
    """The package that compiling needs and this machine lacks; None if there is none."""
    if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        return "the CUDA plugin is not installed: pip install -e '.[compile]'"
    if ptxas() is None:
        return "there is no ptxas: pip install -e '.[compile]'"
    return None


def ptxas() -> Path | None:
    """Path of ptxas: from the installed wheel (pinned version), else from PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or ():
            if file.name == "ptxas":
                return Path(file.locate()).resolve()
    found = shutil.which("ptxas")
    return Path(found) if found else None


@contextlib.contextmanager
def target(chip: str, count: int = 1) -> Iterator:
    """Context with a mesh of `count` such GPUs of one host, for which everything inside is
    traced."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels import dispatch
    from peagle_jax.parallel.partition import AXIS

    config = (_ROOT / "lab" / "data" / f"{chip}.txtpb").read_text(encoding="utf-8")
    gpu = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x1x{count}"
    )
    mesh = topologies.make_mesh(gpu, (count,), (AXIS,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), dispatch.assume(CHIPS[chip]):
        yield mesh


def compile_on(mesh, function, *args, compiler_options: Mapping | None = None, **options):
    """`jax.jit(function, **options)` compiled for shapes `args`, inside `target`.

    Shapes without a sharding are those of arrays that lie on every device.
    """
    import jax

    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(x):
        sharding = getattr(x, "sharding", None) or place
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = jax.jit(function, **options).lower(*jax.tree.map(put, args))
    return lowered.compile(compiler_options=dict(compiler_options or {}))


def spread(specs: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """`most` of the specs, spread evenly over their order from first to last; all if None.

    The first spec of each kernel, weight format, form of activations, head dim, number of experts
    and share of them that these lack is added. Example: 3 of the specs a, b, c, d, e are a, c, e.
    """
    names = list(specs)
    if most is None or most >= len(names):
        return dict(specs)
    step = (len(names) - 1) / max(1, most - 1)
    chosen = {name: specs[name] for name in (names[round(step * i)] for i in range(most))}
    for field in ("kernel", "form", "fp8", "activations", "head_dim", "own", "experts"):
        found = {getattr(spec, field, None) for spec in chosen.values()}
        for name, spec in specs.items():
            if (kind := getattr(spec, field, None)) not in found:
                found.add(kind)
                chosen[name] = spec
    return {name: specs[name] for name in names if name in chosen}


def compile_op(
    op: str,
    chip: str,
    mesh,
    dump: Path,
    most: int | None = None,
    only: Sequence[str] | None = None,
) -> Iterator[Kernel]:
    """The kernels of `most` specs of `op`, see `spread`; with `only` of those with these names.

    Nothing if it has no kernel for the chip.
    """
    specs, device = specs_of(op), CHIPS[chip]
    asked = {name: spec for name, spec in specs_on(op, device).items() if not only or name in only}
    for name, spec in spread(asked, most).items():
        before, start = set(dump.iterdir()), time.perf_counter()
        common = dict(op=op, spec=name, chip=chip)
        try:
            function, args = specs.build(spec)
            with printed_code.kept(dump):
                compile_on(mesh, function, *args)
        except Exception as error:  # whatever it is, the other kernels are to be tried as well
            message = f"{type(error).__name__}: {error}"
            yield Kernel(**common, seconds=time.perf_counter() - start, error=message)
            continue
        common["seconds"] = round(time.perf_counter() - start, 3)
        common["max_registers"] = getattr(spec, "max_registers", 255)
        codes = [path for path in set(dump.iterdir()) - before if path.suffix == ".ptx"]
        codes.sort(key=lambda path: path.stat().st_mtime_ns)
        if not codes:
            yield Kernel(**common, error="no kernel was compiled")
        for code in codes:
            yield _read(code, device, common)


def _read(code: Path, device: Device, common: dict) -> Kernel:
    """A kernel from the PTX and the log of ptxas that Mosaic left."""
    ptx = code.read_text(encoding="utf-8")
    resources = code.with_suffix(".resources.txt").read_text(encoding="utf-8")
    name, registers, spills = printed_code.read_log(code.with_suffix(".ptxas"))
    lines = instructions(ptx)
    wanted = f".target {device.arch}a"
    if wanted not in ptx:
        return Kernel(**common, name=name, error=f"its code has no {wanted!r}")
    return Kernel(
        **common,
        name=name,
        registers=registers,
        spills=spills,
        smem=int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]),
        mma=tuple(sorted(set(_MMA.findall(ptx)))),
        instructions=len(lines),
        code=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    )


def instructions(ptx: str) -> list[str]:
    """The instructions and branch targets of PTX, without directives, comments and debug
    information."""
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    target = re.compile(r"\$L__BB\w+:$")
    return [
        line
        for line in lines
        if target.match(line) or (line.endswith(";") and not line.startswith("."))
    ]


_RECORDED = ("op", "spec", "name", "registers", "spills", "smem", "instructions", "code")


def records_of(kernels: Sequence[Kernel]) -> list[dict]:
    """The recorded fields of each kernel."""
    return [{field: getattr(one, field) for field in _RECORDED} for one in kernels]


def differences(found: Sequence[dict], recorded: Sequence[dict]) -> list[str]:
    """One line per kernel of the operations in `found` whose record is another one, or has none."""
    ops_found = {one["op"] for one in found}
    sides = []
    for records in (found, [one for one in recorded if one["op"] in ops_found]):
        keyed: dict[tuple, dict] = {}
        for one in records:
            key = one["op"], one["spec"], one["name"]
            number = sum(other[:3] == key for other in keyed)
            keyed[*key, number] = one
        sides.append(keyed)
    new, old = sides
    lines = []
    for key in sorted(new.keys() | old.keys()):
        name = " ".join(key[:3])
        if key not in old or key not in new:
            lines.append(
                f"{name}: {'not recorded' if key in new else 'recorded, and not compiled'}"
            )
        elif new[key] != old[key]:
            fields = [field for field in _RECORDED if new[key][field] != old[key][field]]
            lines.append(
                f"{name}: "
                + ", ".join(f"{field} {old[key][field]} -> {new[key][field]}" for field in fields)
            )
    return lines


def records_file(chip: str) -> Path:
    return _ROOT / "lab" / "data" / f"kernels_{chip}.jsonl"


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_records(path: Path, found: Sequence[dict]) -> None:
    """Replaces the records of the operations in `found`."""
    ops_found = {one["op"] for one in found}
    kept = read_records(path) if path.is_file() else []
    records = [*(one for one in kept if one["op"] not in ops_found), *found]
    records.sort(key=lambda one: one["op"])
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def prepare() -> None:
    """Sets up this process to compile for no device and to print its code for
    `printed_code.kept`; before jax is used."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what comes from there leaves no code
    os.environ.pop("MOSAIC_GPU_DUMP_TO", None)  # nothing would be printed
    os.environ.update({f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")})
    os.environ["PATH"] = f"{ptxas().parent}{os.pathsep}{os.environ['PATH']}"


def _table(kernels: Sequence[Kernel]) -> str:
    lines = [("op", "spec", "kernel", "PTX", "regs", "spills", "smem", "s", "")]
    for one in kernels:
        last = one.error.splitlines()[0][:100] if one.error else " ".join(one.mma)
        counts = one.instructions, one.registers, one.spills, one.smem
        numbers = (*map(str, counts), f"{one.seconds:.2f}")
        lines.append((one.op, one.spec, one.name, *numbers, last))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = lambda line: "  ".join(map(str.ljust, line, widths)).rstrip()
    return "\n".join(map(pad, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 if something did not compile or differs, 2 if nothing can be compiled here."""
    parser = argparse.ArgumentParser(prog="python -m lab.deviceless", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--chip", choices=CHIPS, default="h200", help="default: h200")
    parser.add_argument("--op", choices=ops(), action="append", help="default: all")
    parser.add_argument(
        "--most",
        type=int,
        metavar="N",
        help="specs of an operation, spread over their list; default: all",
    )
    parser.add_argument("--spec", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what came out, for programs")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep PTX and logs of ptxas here")
    parser.add_argument("--check", action="store_true", help="only say what would compile")
    parser.add_argument(
        "--compare", action="store_true", help="fail if code is not the recorded one"
    )
    parser.add_argument("--record", action="store_true", help="replace the records")
    args = parser.parse_args(argv)
    if lacking := missing():
        print(f"{parser.prog}: {lacking}", file=sys.stderr)
        return 2
    if args.check:
        print(f"ptxas: {ptxas()}")
        return 0
    if args.spec and (args.record or args.compare):
        parser.error("records are those of all specs of an operation: leave out --spec")
    known = {name for op in args.op or ops() for name in specs_of(op).SPECS}
    if unknown := sorted(set(args.spec or ()) - known):
        parser.error(f"no operation has a spec {unknown[0]!r}; there are {sorted(known)}")
    if args.dump and args.dump.is_dir() and any(args.dump.iterdir()):
        parser.error(f"{args.dump} is not empty")
    with contextlib.ExitStack() as stack:
        dump = args.dump or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dump.mkdir(parents=True, exist_ok=True)
        prepare()
        mesh = stack.enter_context(target(args.chip))
        kernels = [
            kernel
            for op in args.op or ops()
            for kernel in compile_op(op, args.chip, mesh, dump, args.most, args.spec)
        ]
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in kernels], indent=1))
    print(_table(kernels))
    if any(one.error for one in kernels):
        return 1
    if args.record:
        write_records(records_file(args.chip), records_of(kernels))
    if args.compare:
        changed = differences(records_of(kernels), read_records(records_file(args.chip)))
        print("\n".join([*changed, f"{len(changed)} of {len(kernels)} kernels differ"]))
        return 1 if changed else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
