"""Times of a round's masks on this machine's processor: `python -m bench.mask_times`.

The vocabulary is made up: the most frequent words of the Python files of the standard library, with the
space before them, and the beginnings of these words. It has as many tokens as these words give, at most
`--vocab-size`. Needs no model and no device.
"""

import argparse
import collections
import itertools
import json
import os
import re
import shlex
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens
from tqdm import tqdm

from bench import rows
from peagle_jax.engine.structured.grammar import Matcher, definition, masks_of, new_matcher
from peagle_jax.engine.structured.mask_threads import MaskThreads, Window
from peagle_jax.method.plan import mask_words
from peagle_jax.structured import Structured

_PIECE = re.compile(r" ?[A-Za-z]+|\d{1,3}|[^\w\s]{1,4}|\s+")
_STRINGS = {
    "without limit": {"type": "string"},
    "maxLength 64": {"type": "string", "maxLength": 64},
    "maxLength 16": {"type": "string", "maxLength": 16},
}
_END = "<end>"
_VALUES = dict(first_name="Maria Elena", last_name="Rossi Bianchi", city="Santa Barbara", age=41)
_REPEATS = 3


class Words:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it: `size` tokens at most, from the words of `texts`."""

    def __init__(self, size: int, texts: Iterable[str]):
        singles = [bytes([i]) for i in range(256)]
        found = [word for word in _words(texts, size) if len(word) > 1][: size - len(singles) - 1]
        self.tokens = [*singles, *found, _END.encode()]
        self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None
        self.special_token_ids = [self.eos_token_id]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))
        self.vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: str | bytes) -> list[int]:
        data, ids = text.encode() if isinstance(text, str) else text, []
        while data:
            size = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def python_files() -> Iterator[str]:
    """Texts of the standard library's packages."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _words(texts: Iterable[str], most: int) -> list[bytes]:
    """Words of the texts and their beginnings, the most frequent first."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(_PIECE.findall(text))
    beginnings: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        for size in range(2, len(word) + 1):
            beginnings[word[:size]] += count
    return [word.encode() for word, _ in beginnings.most_common(most)]


class _FixedThreads(MaskThreads):
    """Always `most` threads."""

    def fill(
        self, windows: list[Window], masks: np.ndarray, unknown: Sequence[int] = ()
    ) -> dict[int, float]:
        fill_next_token_bitmask_par_with_draft_tokens(self.pool(self.most), windows, masks)
        return {}


def measure(
    words: Words, strings: str, size: int, num_draft: int, num_threads: int | None = None
) -> dict:
    """Times the masks of `size` requests that write the same text; returns a row.

    Args:
      strings: key of `_STRINGS`, the schema of the strings in the text.
      num_threads: threads of all calls; None: the number that the engine chooses.
    """
    fields = {
        name: {"type": "integer"} if isinstance(value, int) else _STRINGS[strings]
        for name, value in _VALUES.items()
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    schema["additionalProperties"] = False
    grammar = definition(Structured.json_schema(schema), None, {})
    text = words(json.dumps(_VALUES))
    threads = MaskThreads() if num_threads is None else _FixedThreads(num_threads)
    width = mask_words(len(words.tokens))
    times, spent = [], []
    for _ in range(_REPEATS):
        matchers = [
            Matcher(new_matcher(words.vocabulary, grammar), threads, {words.eos_token_id}, width)
            for _ in range(size)
        ]
        for place in range(len(text) - num_draft):
            drafts = text[place : place + num_draft]
            begin, cpu = time.perf_counter(), time.process_time()
            masks_of([(one, drafts) for one in matchers], size=size, height=num_draft + 1)
            times.append(1e3 * (time.perf_counter() - begin))
            spent.append(1e3 * (time.process_time() - cpu))
            for one in matchers:
                one.consume([text[place]])
                assert one.error is None, one.error
    return {
        "kind": "masks",
        "vocab_size": len(words.tokens),
        "strings": strings,
        "concurrency": size,
        "num_draft": num_draft,
        "threads": num_threads,
        "calls": len(times),
        "masks_ms": statistics.median(times),
        "masks_ms_mean": statistics.fmean(times),
        "masks_ms_max": max(times),
        "cpu_ms": statistics.median(spent),
        "cores": len(os.sched_getaffinity(0)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.mask_times", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--vocab-size", type=int, default=152_000, metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("-K", type=int, default=7, metavar="K", help="drafts of a round")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[0], metavar="N",
        help="threads of all calls; 0: as many as the engine takes (default)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("masks.jsonl"), metavar="FILE")
    args = parser.parse_args(argv)
    words = Words(args.vocab_size, python_files())
    environment = rows.environment(os.environ.get("PEAGLE_SHA"))
    environment |= {"command": shlex.join(["python", "-m", "bench.mask_times", *sys.argv[1:]])}
    cells = list(itertools.product(_STRINGS, args.concurrency, args.threads))
    for strings, size, num_threads in tqdm(cells, disable=None):
        row = measure(words, strings, size, args.K, num_threads or None) | environment
        rows.append(args.out, rows.rounded(row))
        threads = f", {num_threads} threads" if num_threads else ""
        print(
            f"{strings}, {size} requests{threads}: {row['masks_ms']:.2f} ms, at most {row['masks_ms_max']:.1f}; "
            f"{row['cpu_ms']:.2f} ms of processor time",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
