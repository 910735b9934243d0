"""Source text -> tokenizer, token streams and prompts (`python -m lab.embedded data`).

Writes `tokenizer.json`, `tokenizer_config.json`, `train.npy` and `heldout.npy` (uint16, documents
ended by `<|endoftext|>`), `prompts.jsonl` (function heads and beginnings of lines, for
`peagle-train head`) and `sources.json`.
"""

import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lab.embedded.corpus import Document, collect
from lab.embedded.exercises import exercises
from lab.embedded.functions import functions_of
from peagle_jax.config import ConfigError

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
END_ID = 0
SPECIAL = [END, MASK, PAD, *(f"<|reserved_{i}|>" for i in range(5))]

# A newline merges with the indentation after it; a word with one character before it (" x", ".x").
_PIECES = (
    r"(?:\r?\n[ \t]*)+"
    r"| ?__\p{L}+__"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]+"
)
HEADER = re.compile(
    r'^([ \t]*)def [^\n]*(?:\n[^\n]*){0,4}?:[ \t]*\n[ \t]+"""(?:[^"]|"(?!"")){20,800}?"""', re.M
)
_HEADER_SHARE = 0.4  # of the prompts
_PROMPT_CHARACTERS = (40, 600)
CHAT_TEMPLATE = r"{{ messages | map(attribute='content') | join('\n') }}"
"""Chat template for clients without plain completions: the reply continues the last message."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, how large the tokenizer and its sample are, and what joins the source files."""

    folders: tuple[Path, ...]
    vocab_size: int
    sample_bytes: int
    max_bytes: int
    num_prompts: int
    seed: int
    function_copies: int = 0  # of each function with a docstring, as documents of their own
    exercises: int = 0  # generated functions, as documents of their own
    cut_every: int = 0  # characters of training text from cut to cut on average; 0: no cuts


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with a pre-tokenisation rule for code."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """`tokenizer.json` and the `tokenizer_config.json` that transformers reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def cut_at_random(text: str, every: int, rng: random.Random) -> list[str]:
    """Pieces of `text`, cut once in `every` characters on average, half of them at line breaks.

    The tokenizer merges characters across most places of a text, a newline with the indentation
    after it above all. A prompt can end anywhere. Pieces that are encoded apart teach the model
    what follows there. `every` 0 does not cut.
    """
    if not every:
        return [text]
    places = set()
    for _ in range(int(len(text) / every + rng.random())):
        place = rng.randrange(1, len(text)) if len(text) > 1 else 0
        if rng.random() < 0.5:
            place = text.find("\n", place) + 1
        places.add(place)
    bounds = [0, *sorted(places - {0, len(text)}), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def encode(
    tokenizer: Tokenizer,
    texts: list[str],
    label: str,
    cut: Callable[[str], list[str]],
) -> np.ndarray:
    """One uint16 stream, every document followed by END_ID; parallel inside `tokenizers`.

    `cut` divides a document into pieces that are encoded apart.
    """
    parts = []
    for i in tqdm(range(0, len(texts), 2048), desc=label, mininterval=10.0):
        documents = [cut(text) for text in texts[i : i + 2048]]
        encodings = iter(tokenizer.encode_batch_fast([p for pieces in documents for p in pieces]))
        for pieces in documents:
            ids = [id_ for _ in pieces for id_ in next(encodings).ids]
            parts.append(np.array([*ids, END_ID], np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def prompts(documents: list[Document], count: int, rng: random.Random) -> list[str]:
    """Function heads to the end of the docstring, dedented, and text from a line on."""
    documents = documents[:]
    rng.shuffle(documents)
    heads = [textwrap.dedent(m.group(0)) for d in documents for m in HEADER.finditer(d.text)]
    heads = rng.sample(heads, min(len(heads), int(count * _HEADER_SHARE)))
    pieces = []
    for _ in range(count - len(heads)):
        text = rng.choice(documents).text
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        pieces.append(text[start : start + rng.randint(*_PROMPT_CHARACTERS)])
    found = [piece for piece in [*heads, *pieces] if piece.strip()]
    rng.shuffle(found)
    return found


def _documents(options: DataOptions) -> tuple[list[Document], dict]:
    """Files up to `max_bytes`, in one order on every machine; the report."""
    documents, report = collect(list(options.folders))
    documents.sort(key=lambda d: d.digest)
    total, kept = 0, []
    for document in documents:
        if total >= options.max_bytes:
            break
        kept.append(document)
        total += len(document.text)
    if not kept:
        folders = ", ".join(map(str, options.folders))
        rejected = "".join(f"; {n} rejected: {reason}" for reason, n in report["rejected"].items())
        raise ConfigError(f"{folders}: no Python file to train on{rejected}")
    return kept, report | dict(documents=len(kept), bytes=total)


def _sample(texts: list[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


def prepare(options: DataOptions, out: Path) -> dict:
    """Runs the stage; returns the report that `sources.json` holds.

    Raises:
      ConfigError: no file of the folders is kept.
    """
    kept, report = _documents(options)
    rng = random.Random(options.seed)
    train = [d.text for d in kept if not d.held_out]
    heldout = [d.text for d in kept if d.held_out] or [kept[0].text]
    tokenizer = train_tokenizer(_sample(train, options.sample_bytes), options.vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out, max_length=2048)
    found = list(dict.fromkeys(functions_of(train))) if options.function_copies else []
    train += found * options.function_copies + exercises(options.exercises, options.seed)
    rng.shuffle(train)
    cut = partial(cut_at_random, every=options.cut_every, rng=rng)
    streams = dict(
        train=encode(tokenizer, train, "train", cut),
        heldout=encode(tokenizer, heldout, "heldout", lambda text: [text]),
    )
    for name, stream in streams.items():
        np.save(out / f"{name}.npy", stream)
    rows = prompts([d for d in kept if not d.held_out], options.num_prompts, rng)
    (out / "prompts.jsonl").write_text("".join(json.dumps(dict(prompt=x)) + "\n" for x in rows))
    report |= dict(
        functions=len(found),
        exercises=options.exercises,
        cut_every=options.cut_every,
        tokens={name: len(stream) for name, stream in streams.items()},
        bytes_per_token=sum(map(len, heldout)) / len(streams["heldout"]),
    )
    (out / "sources.json").write_text(json.dumps(report, indent=2) + "\n")
    return report
