"""The command line of `peagle-bench`: its commands and their options."""

import argparse
import textwrap
from pathlib import Path

from bench.arguments import RESULTS, Parser, add_rows, list_of_positive, positive
from bench.service_options import add_hostile, add_reliability, add_serve_load
from peagle_jax.presets import PRESETS

_ABOUT = "Sweeps, full-size decode rounds, and the tables made of their rows."


def _methods(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - {"none", "eagle3", "peagle"})
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown method {unknown[0]!r}")
    return names


def _add_models(parser: argparse.ArgumentParser, *, methods: str, k: list[int]) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="Hugging Face folder of the target (default: embedded)")
    add("--drafter", metavar="DIR", action="append", default=[], help="a head; repeatable")
    add("--model-name", metavar="NAME", help="what rows call the model (default: its folder)")
    add("--methods", type=_methods, default=methods.split(","), help=f"default: {methods}")
    numbers = ",".join(map(str, k))
    add(
        "-K", "--k", type=list_of_positive, default=k, metavar="K,K", help=f"default: {numbers}"
    )  # fmt: skip
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--quantization", choices=("fp8",), help="quantise the target's matrices on the way in")


def _add_common(parser: argparse.ArgumentParser, *, out: str, methods: str) -> None:
    _add_models(parser, methods=methods, k=[3, 5, 7])
    add = parser.add_argument
    add("--max-tokens", type=positive, default=128, metavar="N", help="new tokens per prompt")
    add("--max-model-len", type=positive, default=2048, metavar="N")
    add("--prompt-tokens", type=positive, default=128, metavar="N", help="for prompts cut of text")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    add_rows(parser, out)


def _add_headroom(commands) -> None:
    one = commands.add_parser(
        "headroom",
        help="acceptance of fresh text, recall, oracle, calibration, n-grams of each head",
    )
    _add_models(one, methods="eagle3,peagle", k=[7])
    add = one.add_argument
    add("--sets", nargs="+", default=["HumanEval"], metavar="SET", help="as for acceptance")
    add("--num-prompts", type=positive, metavar="N", help="per set (default: all)")
    add("--texts", type=Path, metavar="DIR", help="keep the greedy texts, or take those kept there")
    add("--max-tokens", type=positive, default=128, metavar="N", help="new tokens per prompt")
    add("--prompt-tokens", type=positive, default=128, metavar="N", help="for prompts cut of text")
    add("--max-model-len", type=positive, default=2048, metavar="N")
    add("--concurrency", type=positive, default=16, metavar="N", help="texts written at once")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    add_rows(one, "headroom.jsonl")
    one.set_defaults(temperature=0.0)


_ABLATIONS = """\
Trains heads that differ in one option each, and compares them. Cells that have a row are skipped:

  peagle-bench headroom --texts run/greedy --sets HumanEval own=peagle_jax
  peagle-bench ablations --text run/text --texts run/greedy --runs run/cells --cells mixed repeats
"""


def _add_ablations(commands) -> None:
    one = commands.add_parser(
        "ablations",
        help="heads trained with one option changed each",
        description=_ABLATIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = one.add_argument
    add("--model", metavar="DIR", help="Hugging Face folder of the target (default: embedded)")
    add("--text", type=Path, required=True, metavar="DIR", help="of `peagle-train continuations`")
    add("--texts", type=Path, required=True, metavar="DIR", help="of `headroom --texts`")
    add("--runs", type=Path, required=True, metavar="DIR", help="where heads are trained")
    add("--cells", nargs="+", required=True, metavar="CELL", help="names; a wrong one lists them")
    add("--steps", type=positive, default=2500, metavar="N", help="default: 2500")
    add("--batch", type=positive, default=64, metavar="N", help="texts per step (default: 64)")
    add("--learning-rate", type=float, default=3e-3, metavar="X", help="peak (default: 3e-3)")
    add("--seed", type=int, default=0, metavar="N")
    add("-K", "--num-draft", type=positive, default=7, metavar="K", help="default: 7")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add(
        "--train-options", nargs=argparse.REMAINDER, default=[], metavar="OPTION",
        help="the rest goes to every `peagle-train drafter`",
    )  # fmt: skip
    add_rows(one, "ablations.jsonl")


_LOSSLESS = """\
Shows that speculation changes nothing: greedy output of every method, K and concurrency beside that
of plain decoding at the largest concurrency, token by token. Exit code 1 when a token differs.

  peagle-bench lossless --concurrency 1,8,32
  peagle-bench lossless --preset qwen3-coder-30b-a3b-fp8 -K 3,7 --tokens 100000

A preset has random weights made on the device, and prompts of random tokens. Its heads know nothing;
so the reference stands in for them in seven drafts of ten, and drafts are accepted and rejected.
"""


def _add_lossless(commands) -> None:
    one = commands.add_parser(
        "lossless",
        help="greedy output with and without speculation, token by token",
        description=_LOSSLESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_models(one, methods="none,eagle3,peagle", k=[3, 7])
    add = one.add_argument
    add("--preset", metavar="NAME", help="a full-size model, as for decode-step")
    add("--layers", type=positive, metavar="N", help="its first N layers only")
    add("--seed", type=int, default=0, metavar="N", help="of a preset's weights and prompts")
    add("--set", default="HumanEval", metavar="SET", help="as for acceptance; not for presets")
    add(
        "--tokens", type=positive, default=20_000, metavar="N",
        help="to compare, in all cells together (default: 20000)",
    )  # fmt: skip
    add("--concurrency", type=list_of_positive, default=[1, 32], metavar="N,N")
    add("--max-tokens", type=positive, default=256, metavar="N", help="new tokens per prompt")
    add("--min-prompts", type=positive, default=4, metavar="N", help="of a cell; few requests at "
        "once are otherwise given few prompts, or they would take most of the time")  # fmt: skip
    add(
        "--prompt-tokens", type=positive, default=256, metavar="N",
        help="of a preset's longest prompt, or of all that are cut of text (default: 256)",
    )  # fmt: skip
    add("--page-size", type=positive, default=64, metavar="N", help="default: 64")
    add("--prefill-chunk", type=positive, default=128, metavar="N", help="default: 128")
    add("--prefill-rows", type=positive, default=8, metavar="N", help="prompts per call, at most")
    add_rows(one, "lossless.jsonl")


_DECODE_STEP = """\
Times rounds of a real model's shape, with random weights made on the device, through the engine:

  peagle-bench decode-step --preset qwen3-coder-30b-a3b-fp8 --method none eagle3 peagle -K 3 7 \\
      --synthetic-acceptance-length 3.1 --concurrency 1 8 32

A cell is a method, a K and a concurrency; each adds a row: milliseconds per round at a full batch
(host included), tokens/s, prefill, peak memory, and the share of the memory-bound floor. Shorten a
first try with --layers 4 --max-tokens 64.

Presets: {presets};
with -fp8 at the end in FP8 blocks (all but GPT-OSS, which is MXFP4).
"""


def _add_decode_step(commands) -> None:
    one = commands.add_parser(
        "decode-step",
        help="ms per round of full-size models with random weights",
        description=_DECODE_STEP.format(presets=textwrap.fill(", ".join(PRESETS), 100)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = one.add_argument
    add("--preset", required=True, metavar="NAME", help="model; -fp8: its block-quantised form")
    add("--weights", choices=("random",), default="random", help="where weights come from")
    add("--layers", type=positive, metavar="N", help="its first N layers only")
    add(
        "--method", nargs="+", choices=("none", "eagle3", "peagle"), metavar="METHOD",
        default=["none", "eagle3", "peagle"], help="none eagle3 peagle (default: all)",
    )  # fmt: skip
    add("-K", "--k", nargs="+", type=positive, metavar="K", help="drafts per round (default: 7)")
    add(
        "--concurrency", nargs="+", type=positive, default=[1, 8, 32], metavar="N",
        help="requests at once (default: 1 8 32)",
    )  # fmt: skip
    add(
        "--synthetic-acceptance-length", type=float, metavar="A",
        help="mean tokens per round, 1 to K+1; without it random heads are hardly ever right",
    )  # fmt: skip
    add("--prompt-tokens", type=positive, default=512, metavar="N", help="default: 512")
    add("--max-tokens", type=positive, default=512, metavar="N", help="new tokens (default: 512)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="default: 1, for diverse routing",
    )
    add("--draft-sampling", choices=("argmax", "sample"), default="argmax")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="default: as --dtype")
    add("--page-size", type=positive, default=64, metavar="N", help="default: 64")
    add("--prefill-chunk", type=positive, default=512, metavar="N", help="default: 512")
    add("--prefill-rows", type=positive, default=8, metavar="N", help="prompts per call, at most")
    add("--seed", type=int, default=0, metavar="N", help="of weights and prompts")
    add(
        "--profile", nargs="?", const="", metavar="DIR",
        help="trace some rounds after timing and list their kernels; keep the traces in DIR",
    )  # fmt: skip
    add("--profile-rounds", type=positive, default=4, metavar="N", help="default: 4")
    add(
        "--cold-start", action="store_true",
        help="instead of rounds: seconds from process start to first token, cold and warm cache",
    )  # fmt: skip
    add_rows(one, "decode_step.jsonl")


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    parser = Parser(prog="peagle-bench", description=_ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    one = commands.add_parser("acceptance", help="acceptance length by head, K and prompt set")
    _add_common(one, out="acceptance.jsonl", methods="eagle3,peagle")
    one.add_argument(
        "--sets", nargs="+", default=["HumanEval", "MT-Bench"], metavar="SET",
        help="HumanEval, MT-Bench, or NAME=FILE (JSONL, a text file, a folder of *.py)",
    )  # fmt: skip
    one.add_argument("--num-prompts", type=positive, metavar="N", help="per set (default: all)")
    one.add_argument("--concurrency", type=positive, default=8, metavar="N")

    one = commands.add_parser("throughput", help="tokens/s by method, K and concurrency")
    _add_common(one, out="throughput.jsonl", methods="none,eagle3,peagle")
    one.add_argument("--set", default="HumanEval", metavar="SET", help="as for acceptance")
    one.add_argument(
        "--concurrency", type=list_of_positive, default=[1, 2, 4, 8, 16, 32], metavar="N,N"
    )
    one.add_argument("--prompts-per-slot", type=positive, default=2, metavar="N")
    one.add_argument("--min-prompts", type=positive, default=4, metavar="N")
    one.add_argument("--prefill-rows", type=positive, default=1, metavar="N")

    _add_headroom(commands)
    _add_ablations(commands)
    _add_lossless(commands)
    _add_decode_step(commands)
    add_serve_load(commands)
    add_hostile(commands)
    add_reliability(commands)

    one = commands.add_parser("kernels", help="each kernel beside its reference, on a GPU")
    one.add_argument("--op", action="append", metavar="NAME", help="repeatable (default: all)")
    one.add_argument("--spec", action="append", metavar="NAME", help="repeatable (default: all)")
    one.add_argument(
        "--configs", action="store_true", help="also in other configs than the chosen one"
    )
    one.add_argument("--ladder", action="store_true", help="the steps of docs/ladder.md instead")
    add_rows(one, "kernels.jsonl")

    one = commands.add_parser("conversion", help="peagle-convert against a plain copy")
    one.add_argument("folder", type=Path, metavar="DIR", help="new folder on the disk to measure")
    one.add_argument("--preset", default="gpt-oss-20b", help="default: gpt-oss-20b")
    one.add_argument("--quantization", choices=("none", "fp8", "mxfp4"), default="mxfp4")
    one.add_argument("--layers", type=positive, metavar="N", help="its first N layers only")
    one.add_argument("--out", type=Path, default=RESULTS / "conversion.jsonl", metavar="FILE.jsonl")
    one.add_argument("--sha", help="commit for the row, where git is not at hand (or PEAGLE_SHA)")

    commands.add_parser("sizes", help="weights, KV cache and what fits on one GPU, by model")

    one = commands.add_parser("report", help="tables and plots from stored rows")
    one.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    one.add_argument(
        "--pages", type=Path, nargs="*", metavar="FILE",
        help="redraw their bench:NAME blocks (default: the README and pages of docs/ that have some; "
        "none with --results)",
    )  # fmt: skip
    one.add_argument("--plots", type=Path, metavar="DIR", help="default: beside the rows")
    return parser
