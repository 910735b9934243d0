"""Regenerates the golden files beside this script, or checks that they have not drifted.

    python tests/golden/make_golden.py [--out DIR]    write them (default: in place)
    python tests/golden/make_golden.py --check        write them elsewhere, compare, exit 1 on drift

Needs Python 3.11 and what requirements.txt and requirements-no-deps.txt pin; nothing of peagle_jax.
Each folder is a checkpoint but `expected/`, which holds what independent PyTorch code computes with
them, array by array as `targets.record` and `heads.write` say. `targets`, `families` and `heads`
say what the checkpoints exercise; `gemma4-text` has no weights, only a second form of gemma4's
config. Other layouts of the same heads are not files: tests derive them with `layouts`.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here comes from a hub

import families
import heads
import targets
import torch
import transformers
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
RTOL, ATOL = 1e-5, 2e-5
"""Allowed drift of a float32 array: ATOL + RTOL times its largest magnitude, because torch's CPU
kernels differ between machines in the last bits of the largest terms of a sum. Others have none."""


def write(out: Path) -> None:
    """Every golden folder, below `out`."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    for family in targets.CONFIGS:
        targets.write(family, out)
    for name in families.TARGETS:
        families.write(name, out)
    recorded = heads.write_sequence(out)
    for name in heads.HEADS:
        heads.write(name, recorded, out)


def golden_files(root: Path) -> set[Path]:
    """The files that `write` makes, relative to `root`."""
    return {p.relative_to(root) for end in ("json", "safetensors") for p in root.glob(f"*/*.{end}")}


def compare(committed: Path, fresh: Path) -> list[str]:
    """What differs between two files of one name, as sentences."""
    if committed.suffix == ".json":
        same = json.loads(committed.read_text()) == json.loads(fresh.read_text())
        return [] if same else ["the JSON differs"]
    old, new = load_file(committed), load_file(fresh)
    problems = [f"{name} is only in one of them" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        a, b = old[name], new[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{name} was {a.dtype}{a.shape} and is {b.dtype}{b.shape}")
        elif a.dtype != torch.float32:
            differing = (a.double() != b.double()).sum()
            if differing:
                problems.append(f"{name} differs in {differing} of {a.numel()} places")
        else:
            drift, allowed = (a - b).abs().max(), ATOL + RTOL * a.abs().max()
            if not drift <= allowed:  # also true of NaN
                problems.append(f"{name} differs by up to {drift:.3g}, {allowed:.3g} is allowed")
    return problems


def check() -> list[str]:
    """Every drift of the committed files from freshly made ones."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        write(fresh)
        old, new = golden_files(HERE), golden_files(fresh)
        problems = [f"{path}: not committed" for path in sorted(new - old)]
        problems += [f"{path}: no longer made" for path in sorted(old - new)]
        for path in sorted(old & new):
            problems += [f"{path}: {text}" for text in compare(HERE / path, fresh / path)]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    args = parser.parse_args()
    if not args.check:
        write(args.out)
        return
    problems = check()
    if problems:
        sys.exit(
            "golden files have drifted:\n  " + "\n  ".join(problems) + "\nInstall the pinned "
            "requirements; if the change is meant, run make_golden.py and commit what it writes."
        )
    sys.stdout.write("golden files are up to date\n")


if __name__ == "__main__":
    main()
