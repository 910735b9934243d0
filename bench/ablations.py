"""`peagle-bench ablations`: heads whose training differs in one option, compared on the same texts.

Every cell is a `peagle-train drafter` command. Cells with a row are skipped and killed ones resume from
their checkpoint, so repeating the command completes the table.
"""

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bench import rows
from bench.commands.ablations import Options
from bench.head_tables import drafts_of
from bench.headroom import measure, stored_texts, summary
from peagle_jax.checkpoint import load_target
from peagle_jax.cli import runs
from peagle_jax.cli.loading import embedded
from peagle_jax.config import ConfigError
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.training.__main__ import run as train
from peagle_jax.training.options import parser as training_parser
from peagle_jax.training.trainer import cast, split_model

_EQUAL = "--repeat-weight 1 --no-from-layers"
_MIXED = f"--method peagle --elements texts --weights depth {_EQUAL}"
_GREEDY = f"{_MIXED} --max-temperature 0"
_PACED = f"{_MIXED} --repeat-weight 0.2 --weights dpace"
_PICKED = f"{_PACED} --anchors 256"
_EAGLE3_PICKED = "--method eagle3 --repeat-weight 0.2 --anchors 256"
CELLS = {
    "mixed": _MIXED,
    "greedy": _GREEDY,
    "anchors": f"--method peagle --elements anchors --max-temperature 0 {_EQUAL}",
    "repeats": f"{_GREEDY} --repeat-weight 0.2",
    "dpace": f"{_GREEDY} --weights dpace",
    "ce": f"{_GREEDY} --loss ce",
    "sharpen": f"{_GREEDY} --sharpen 0.5",
    "depths-10": f"{_GREEDY} --depths 10",
    "rate-1.0": f"{_GREEDY} --rate 1.0",
    "repeats-dpace": f"{_GREEDY} --repeat-weight 0.2 --weights dpace",
    "repeats-ce": f"{_GREEDY} --repeat-weight 0.2 --loss ce",
    "dpace-ce": f"{_GREEDY} --weights dpace --loss ce",
    "repeats-dpace-ce": f"{_GREEDY} --repeat-weight 0.2 --weights dpace --loss ce",
    "mixed-repeats": f"{_MIXED} --repeat-weight 0.2",
    "mixed-repeats-dpace": f"{_MIXED} --repeat-weight 0.2 --weights dpace",
    "mixed-picked": _PICKED,
    "picked": f"{_PICKED} --max-temperature 0",
    "mixed-picked-equal-repeats": f"{_MIXED} --weights dpace --anchors 256",
    "mixed-picked-equal-depths": f"{_MIXED} --repeat-weight 0.2 --anchors 256",
    "mixed-picked-ce": f"{_PICKED} --loss ce",
    "mixed-picked-depths-10": f"{_PICKED} --depths 10",
    "mixed-picked-taps-5": f"{_PICKED} --taps 1 4 7 9 11",
    "mixed-picked-layers": f"{_PICKED} --from-layers",
    "mixed-picked-1-layer": f"{_PICKED} --layers 1",
    "mixed-picked-2-layers": f"{_PICKED} --layers 2",
    "mixed-picked-hidden-depth": f"{_PICKED} --hidden depth",
    "mixed-picked-hidden-token": f"{_PICKED} --hidden token",
    "mixed-picked-hidden-both": f"{_PICKED} --hidden both",
    "mixed-picked-hidden-mix": f"{_PICKED} --hidden mix",
    "mixed-picked-depths-5": f"{_PICKED} --depths 5",
    "mixed-picked-depths-12": f"{_PICKED} --depths 12",
    "mixed-picked-frozen-embedding": f"{_PICKED} --share embedding",
    "mixed-picked-text-128": f"{_PACED} --text-length 128 --anchors 64",
    "mixed-picked-text-512": f"{_PACED} --text-length 512 --anchors 256",
    "mixed-picked-text-1024": f"{_PACED} --text-length 1024 --anchors 512",
    "mixed-depths-10": f"{_MIXED} --depths 10",
    "mixed-ce": f"{_MIXED} --loss ce",
    "layers-1": f"{_GREEDY} --layers 1",
    "layers-2": f"{_GREEDY} --layers 2",
    "frozen-unembedding": f"{_GREEDY} --share unembedding",
    "eagle3-mixed": "--method eagle3 --repeat-weight 1",
    "eagle3-mixed-picked": _EAGLE3_PICKED,
    "eagle3-picked": f"{_EAGLE3_PICKED} --max-temperature 0",
    "eagle3-mixed-picked-equal-repeats": "--method eagle3 --repeat-weight 1 --anchors 256",
    "eagle3-mixed-picked-ce": f"{_EAGLE3_PICKED} --loss ce",
    "eagle3-mixed-picked-depths-10": f"{_EAGLE3_PICKED} --depths 10",
    "eagle3-mixed-picked-taps-5": f"{_EAGLE3_PICKED} --taps 1 4 7 9 11",
    "eagle3": "--method eagle3 --repeat-weight 1 --max-temperature 0",
    "eagle3-repeats": "--method eagle3 --max-temperature 0 --repeat-weight 0.2",
    "eagle3-ce": "--method eagle3 --repeat-weight 1 --max-temperature 0 --loss ce",
}
"""Options of `peagle-train drafter`. Heads of cells with "mixed" in their name see sampled texts too, the
others greedy texts alone. Cells with "text" in their name are for `--text` of 1,024 tokens: they have equal
numbers of tokens and anchors in a step."""


def _identity(options: Options, cell: str) -> dict:
    return dict(
        cell=cell, steps=options.steps, seed=options.seed, batch=options.batch,
        learning_rate=options.learning_rate, texts=options.text.name, num_draft=options.num_draft,
    )  # fmt: skip


def _command(options: Options, cell: str, out: Path) -> list[str]:
    """Command line of `peagle-train` for a cell."""
    target = options.model or embedded("target")
    half = max(1, options.steps // 2)
    return [
        "drafter", *CELLS[cell].split(), "--target", str(target), "--text", str(options.text),
        "--out", str(out), "--steps", str(options.steps), "--batch", str(options.batch),
        "--seed", str(options.seed), "--num-draft", str(options.num_draft), "--dtype", options.dtype,
        "--learning-rate", str(options.learning_rate),
        "--adam-learning-rate", str(options.learning_rate * 2 / 3),
        "--eval-every", str(half), "--save-every", str(half), *options.train_options,
    ]  # fmt: skip


def _ms_per_step(folder: Path, tokens_per_step: int) -> float:
    """Median over the rows of the curve, so that compilation and checkpoints do not count."""
    with (folder / "train.csv").open(newline="") as file:
        speeds = [float(row["tokens_per_s"]) for row in csv.DictReader(file)]
    return 1e3 * tokens_per_step / statistics.median(speeds)


def _validation(folder: Path) -> dict:
    """The last row of the held-out curve."""
    with (folder / "eval.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    names = ("acceptance_length", "fresh_acceptance_length", "loss")
    return {name: float(last[name]) for name in names}


def _as_stored(head: DraftHead, dtype: str) -> DraftHead:
    """The head with its weights rounded as in a file; files do not hold every form (`--hidden`)."""
    params, merge = split_model(head)
    return merge(cast(cast(params, jnp.bfloat16), dtype))


def _results(options: Options, head: DraftHead) -> dict:
    """Acceptance of a trained head on every set of stored texts."""
    target = load_target(options.model or embedded("target"), dtype=options.dtype)
    head = _as_stored(head, options.dtype)
    results = {}
    for path in sorted(options.texts.glob("*.npz")):
        text = stored_texts(path, None)
        bucket = -(-text.tokens.shape[1] // 64) * 64
        found = measure(
            target, head, text, num_draft=options.num_draft, dtype=options.dtype, bucket=bucket
        )
        whole = summary(found)
        results[path.stem] = {
            name: whole[name]
            for name in (
                "acceptance_length",
                "fresh_acceptance_length",
                "acceptance_per_position",
                "oracle_acceptance_length",
            )
        }
    return results


def _train(options: Options, cell: str) -> dict:
    """Trains one cell to its end and measures the head."""
    folder = options.runs / "-".join(str(x) for x in _identity(options, cell).values())
    try:
        head = train(training_parser().parse_args(_command(options, cell, folder)))
    except FloatingPointError as error:
        raise ConfigError(f"cell {cell}: {error}") from error
    with np.load(options.text / "train.npz") as file:
        width = file["tokens"].shape[1]
    return dict(
        options=CELLS[cell],
        ms_per_step=_ms_per_step(folder, options.batch * width),
        validation=_validation(folder),
        sets=_results(options, head),
    )


def ablations(options: Options, environment: dict) -> list[dict]:
    """Trains the cells that have no row yet, appends a row each, and returns all rows of the table."""
    unknown = [cell for cell in options.cells if cell not in CELLS]
    if unknown:
        raise ConfigError(f"unknown cell {unknown[0]!r}; known are {', '.join(CELLS)}")
    for path in (options.text / "train.npz", options.text / "heldout.npz"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; `peagle-train continuations` writes it")
    options = replace(options, dtype=runs.choose_dtype(options.dtype))
    before = rows.read([options.out]) if options.out.exists() else []
    known = [row for row in before if row["kind"] == "ablation"]
    known = [row | dict(num_draft=drafts_of(row)) for row in known]
    done = []
    for cell in options.cells:
        identity = _identity(options, cell)
        same = [row for row in known if identity.items() <= row.items()]
        row = same[-1] if same else None
        if row is None:
            row = dict(kind="ablation", **identity, **_train(options, cell), **environment)
            row = rows.rounded(row)
            rows.append(options.out, row)
        done.append(row)
    return done


def table(done: list[dict]) -> str:
    """Rows as text: acceptance length, and in brackets that of fresh rounds."""
    names = sorted({name for row in done for name in row["sets"]})
    both = lambda x: f"{x['acceptance_length']:.3f} ({x['fresh_acceptance_length']:.3f})"
    lines = [
        [
            row["cell"],
            str(row["steps"]),
            f"{row['ms_per_step']:.1f}",
            both(row["validation"]),
            f"{row['validation']['loss']:.4f}",
            *(both(row["sets"][name]) if name in row["sets"] else "" for name in names),
        ]
        for row in done
    ]
    return runs.table(["cell", "steps", "ms/step", "validation", "KL", *names], lines)
