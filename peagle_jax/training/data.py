"""Source text -> tokenizer and token streams (`peagle-train data`).

Writes `tokenizer.json`, `tokenizer_config.json`, `train.npy` and `heldout.npy` (uint16, documents ended
by `<|endoftext|>`), `headers.npz` (function heads with docstrings, for prompts) and `sources.json`.
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

from peagle_jax.config import ConfigError
from peagle_jax.training.corpus import Document, collect
from peagle_jax.training.exercises import exercises
from peagle_jax.training.functions import functions_of

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
END_ID, MASK_ID, PAD_ID = 0, 1, 2
SPECIAL = [END, MASK, PAD, *(f"<|reserved_{i}|>" for i in range(5))]

# A newline merges with the indentation after it; a word with one character before it (" x", ".x", "(x").
_PIECES = (
    r"(?:\r?\n[ \t]*)+"
    r"| ?__\p{L}+__"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]+"
)
_HEADER = re.compile(
    r'^([ \t]*)def [^\n]*(?:\n[^\n]*){0,4}?:[ \t]*\n[ \t]+"""(?:[^"]|"(?!"")){20,800}?"""', re.M
)
MAX_HEADER = 192
CHAT_TEMPLATE = r"{{ messages | map(attribute='content') | join('\n') }}"
"""Chat template for clients without plain completions: the reply continues the last message's code."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, how large the tokenizer and its training sample are, and what is added to the source files."""

    folders: tuple[Path, ...]
    vocab_size: int
    sample_bytes: int
    max_bytes: int
    num_headers: int
    seed: int
    function_copies: int = 0  # of each function with a docstring, as documents of their own
    exercises: int = 0  # generated functions, as documents of their own
    cut_every: int = 0  # characters of training text from cut to cut on average; 0: no cuts
    tokenizer: Path | None = None  # use an existing target's tokenizer


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


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer that an earlier run of this stage trained.

    Raises:
      ConfigError: the file cannot be read, or has different reserved ids.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ConfigError(f"{path}: no tokenizer can be read from it ({error})") from error
    ids = {END: END_ID, MASK: MASK_ID, PAD: PAD_ID}
    if any(tokenizer.token_to_id(token) != i for token, i in ids.items()):
        raise ConfigError(f"{path}: tokens {', '.join(ids)} must have ids 0, 1 and 2")
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
    """Pieces of `text`, cut once in `every` characters on average, at random characters and line breaks; 0: the text.

    The tokenizer merges characters across most places of a text, a newline with the indentation after it above all.
    A prompt can end anywhere. Pieces that are encoded apart teach the model what follows there.
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


def headers(
    tokenizer: Tokenizer, documents: list[Document], count: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Function heads up to the end of the docstring, dedented: tokens [n, MAX_HEADER], lengths [n]."""
    documents = documents[:]
    rng.shuffle(documents)
    texts: list[str] = []
    for document in documents:
        if len(texts) >= 2 * count:
            break
        matches = [m.group(0) for m in _HEADER.finditer(document.text)]
        texts += [textwrap.dedent(m) for m in rng.sample(matches, min(4, len(matches)))]
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts) if 12 <= len(e.ids) <= MAX_HEADER]
    ids = ids[:count]
    tokens = np.full((len(ids), MAX_HEADER), PAD_ID, np.uint16)
    for row, piece in zip(tokens, ids, strict=True):
        row[: len(piece)] = piece
    return tokens, np.array([len(piece) for piece in ids], np.int32)


def prepare(options: DataOptions, out: Path) -> dict:
    """Runs the stage; returns the report that `sources.json` holds.

    Raises:
      ConfigError: no file of the folders is kept, or `options.tokenizer` cannot be used.
    """
    documents, report = collect(list(options.folders))
    rng = random.Random(options.seed)
    # A fixed shuffle: the same order on every machine, with packages interleaved.
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
    train = [d for d in kept if not d.held_out]
    heldout = [d for d in kept if d.held_out] or kept[:1]

    def sample() -> Iterator[str]:
        left = options.sample_bytes
        for document in train:
            if left <= 0:
                return
            left -= len(document.text)
            yield document.text

    if options.tokenizer is None:
        tokenizer = train_tokenizer(sample(), options.vocab_size)
    else:
        tokenizer = read_tokenizer(options.tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out, max_length=2048)
    texts = dict(train=[d.text for d in train], heldout=[d.text for d in heldout])
    if options.function_copies:
        found = list(dict.fromkeys(functions_of(texts["train"])))
        report |= dict(functions=len(found), function_copies=options.function_copies)
        texts["train"] += found * options.function_copies
    if options.exercises:
        report |= dict(exercises=options.exercises)
        texts["train"] += exercises(options.exercises, options.seed)
    if options.function_copies or options.exercises:
        rng.shuffle(texts["train"])
    cut = dict(train=options.cut_every, heldout=0)
    streams = {
        name: encode(tokenizer, split, name, partial(cut_at_random, every=cut[name], rng=rng))
        for name, split in texts.items()
    }
    report |= dict(cut_every=options.cut_every)
    for name, stream in streams.items():
        np.save(out / f"{name}.npy", stream)
    arrays = {}
    for name, split, count in (
        ("train", train, options.num_headers),
        ("heldout", heldout, options.num_headers // 20),
    ):
        arrays[f"{name}_tokens"], arrays[f"{name}_length"] = headers(tokenizer, split, count, rng)
    np.savez(out / "headers.npz", **arrays)
    report |= dict(
        documents=len(kept),
        bytes=total,
        tokens={name: len(stream) for name, stream in streams.items()},
        headers={name: len(arrays[f"{name}_length"]) for name in streams},
        bytes_per_token=sum(map(len, texts["heldout"])) / len(streams["heldout"]),
        vocab_size=tokenizer.get_vocab_size(),
    )
    (out / "sources.json").write_text(json.dumps(report, indent=2) + "\n")
    return report
