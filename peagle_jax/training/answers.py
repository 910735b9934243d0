"""Training texts of a target: the engine writes the answers to prompts, and rows are packed.

Finished parts are kept, so a killed run goes on after the last one. `train.npz` has packed rows:
texts one behind the other, as one long conversation, with the array `answer` for what is trained.
`heldout.npz` has one greedy answer a row, for the evaluation.
"""

import gc
import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from peagle_jax.checkpoint.target_json import target_config
from peagle_jax.cli import runs
from peagle_jax.cli.loading import load_weights
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.models.weight_order import tile_columns
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import Tokenizer
from peagle_jax.training import chats
from peagle_jax.training.curves import write_whole

_log = logging.getLogger(__name__)
_LEAST_ROOM = 16  # tokens of an answer for which a prompt is worth its place
_BATCHES = 4  # of a part, which is lost if the run is killed
_OPEN_ROWS = 64  # rows that a text may be packed into
_LONGEST_PERIOD, _ROUNDS, _LEAST_LOOP = 128, 3, 48  # tokens, times, tokens after the first time


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is answered, and how. A row has up to `length` tokens, an answer up to `max_tokens`."""

    prompts: tuple[Path, ...]
    chat: bool | None
    prompt_tokens: int
    length: int
    max_tokens: int
    num_heldout: int
    temperatures: tuple[float, ...]  # cycled over the training texts
    concurrency: int
    seed: int


class Written(NamedTuple):
    """A text, its number of given tokens, and which tokens are trained."""

    tokens: np.ndarray
    prompt: int
    answer: np.ndarray


def engine_of(folder: Path, *, dtype: str, concurrency: int, length: int) -> Engine:
    """An engine that decodes plainly: drafts change no text, and there is no head yet.

    Raises:
      ConfigError: the target has no tokenizer, or is shorter than `length` tokens.
    """
    target, _, tokenizer = load_weights(folder, None, method="none", dtype=dtype)
    config = EngineConfig(
        num_draft=0,
        max_num_seqs=concurrency,
        max_model_len=length,
        dtype=dtype,
        programs_folder=runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME")),
    )
    tile_columns(target)
    engine = Engine(target, None, runs.with_prefill_sizes(config), tokenizer=tokenizer)
    runs.compile_in_sight(engine)
    return engine


def _split(rows: list[chats.Row], options: AnswerOptions) -> dict[str, list[chats.Row]]:
    """Held-out and training rows, in a fixed random order, that have room for an answer."""
    room = options.length - _LEAST_ROOM
    fits = lambda row: len(row.tokens) <= room if row.is_open else any(row.answer)
    kept = [row for row in rows if fits(row)]
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts have more than {room} tokens"
        _log.warning("left out: %s or an empty answer; see --length", dropped)
    if len(kept) < 2:
        raise ConfigError("--prompts needs at least two different prompts: one is held out")
    order = np.random.default_rng(options.seed).permutation(len(kept))
    kept = [kept[i] for i in order]
    count = max(1, min(options.num_heldout, len(kept) // 10))
    heldout = [row.reopened() for row in kept[:count]]
    heldout = [row for row in heldout if 1 <= len(row.tokens) <= room]
    if not heldout:
        raise ConfigError("--prompts: no held-out prompt leaves room for an answer; raise --length")
    return dict(heldout=heldout, train=kept[count:])


def _rows(folder: Path, options: AnswerOptions) -> list[chats.Row]:
    return chats.read(
        options.prompts,
        Tokenizer(folder),
        target_config(folder).eos_ids,
        chat=options.chat,
        prompt_tokens=options.prompt_tokens,
    )


class Expected(NamedTuple):
    """Of texts that are not written yet: prompts, those that the target answers, and packed rows if
    every answer is as long as it may be."""

    prompts: int
    answers: int
    rows: int
    heldout: int


def expected(folder: Path, options: AnswerOptions) -> Expected:
    """What `write` would make; it runs no target.

    Raises:
      ConfigError: prompts that cannot be read.
    """
    split = _split(_rows(folder, options), options)
    longest = lambda row: len(row.tokens) + row.is_open * options.max_tokens
    tokens = sum(min(options.length, longest(row)) for row in split["train"])
    every = [row for some in split.values() for row in some]
    return Expected(
        prompts=len(every),
        answers=sum(row.is_open for row in every),
        rows=max(1, -(-tokens // options.length)),
        heldout=len(split["heldout"]),
    )


def write(folder: Path, options: AnswerOptions, out: Path, *, dtype: str) -> None:
    """Writes `train.npz` and `heldout.npz` with answers of the target in `folder`.

    Raises:
      ConfigError: prompts that cannot be read, or `out` has answers to others.
    """
    rows = _rows(folder, options)
    split = _split(rows, options)
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    asked = asdict(options) | dict(prompts=digest, target=identity(folder, dtype))
    claim(out, asked | dict(concurrency=None))
    if (out / "train.npz").exists():
        return
    sizes = dict(concurrency=options.concurrency, length=options.length)
    engine = engine_of(folder, dtype=dtype, **sizes)
    total = sum(row.is_open for some in split.values() for row in some)
    with tqdm(total=total, unit="answer", desc="answers", mininterval=1.0) as bar:
        written = {
            name: _answered(engine, some, options, out / name, bar) for name, some in split.items()
        }
    del engine
    gc.collect()  # its caches, which fill the device, before the training
    _save(out / "heldout.npz", [[one] for one in written["heldout"]], options.length)
    rows_of_texts = pack(written["train"], options.length, np.random.default_rng(options.seed))
    _save(out / "train.npz", rows_of_texts, options.length)


def identity(folder: Path, dtype: str) -> list:
    """What tells a target from another: its dtype, its configuration, and its files of weights."""
    files = sorted(Path(folder).glob("*.safetensors"))
    config = (Path(folder) / "config.json").read_bytes()
    digest = hashlib.sha256(config).hexdigest()
    return [dtype, digest, [[file.name, file.stat().st_size] for file in files]]


def claim(folder: Path, asked: dict) -> None:
    """Notes what a folder's parts are of; refuses a folder with parts of another request."""
    folder.mkdir(parents=True, exist_ok=True)
    path, asked = folder / "request.json", json.dumps(asked, default=str)
    before = path.read_text() if path.exists() else None
    if before != asked and (before is not None or any(folder.glob("part-*"))):
        raise ConfigError(
            f"{folder} has texts of another model, or of other prompts or options; "
            "remove it or choose another --out"
        )
    write_whole(path, asked)


def _answered(
    engine: Engine, rows: list[chats.Row], options: AnswerOptions, folder: Path, bar: tqdm
) -> list[Written]:
    """All texts of a split, in parts of several batches, which are stored as they are finished.

    A part begins where the one before ended, so a run may go on with another concurrency.
    """
    folder.mkdir(exist_ok=True)
    size, written = _BATCHES * options.concurrency, []
    while (start := len(written)) < len(rows):
        path = folder / f"part-{start:07d}.npz"
        is_new = not path.exists()
        if is_new:
            _write_part(engine, rows[start : start + size], start, options, path, bar)
        with np.load(path) as file:
            cuts = np.cumsum(file["length"])[:-1]
            flat = (np.split(file[key], cuts) for key in ("tokens", "answer"))
            written += [
                Written(tokens, int(prompt), answer)
                for tokens, answer, prompt in zip(*flat, file["prompt"], strict=True)
            ]
        if not is_new:
            bar.update(sum(row.is_open for row in rows[start : len(written)]))
    return written


def _write_part(engine, rows, start: int, options: AnswerOptions, path: Path, bar: tqdm) -> None:
    asked = [(start + i, row) for i, row in enumerate(rows) if row.is_open]
    cycle = (0.0,) if path.parent.name == "heldout" else options.temperatures
    params = [
        SamplingParams(
            max_tokens=min(options.max_tokens, options.length - len(row.tokens)),
            temperature=cycle[number % len(cycle)],
            seed=options.seed + number,
        )
        for number, row in asked
    ]
    count = lambda request, _: bar.update(request.is_finished)
    done = iter(engine.generate([list(row.tokens) for _, row in asked], params, on_update=count))
    texts = []
    for row in rows:
        added = without_loop(next(done).tokens) if row.is_open else []
        tokens = np.array([*row.tokens, *added], np.uint32)[: options.length]
        answer = np.array([*row.answer, *[True] * len(added)], bool)[: options.length]
        prompt = int(answer.argmax()) if answer.any() else len(tokens)
        texts.append(Written(tokens, prompt, answer))
    _save_whole(
        path,
        tokens=np.concatenate([one.tokens for one in texts]),
        answer=np.concatenate([one.answer for one in texts]),
        length=np.array([len(one.tokens) for one in texts], np.int32),
        prompt=np.array([one.prompt for one in texts], np.int32),
    )


def without_loop(tokens: list[int]) -> list[int]:
    """An answer up to the second round of the loop that it ends in, if it does.

    Small models that decode greedily repeat themselves until `max_tokens`. Any head drafts a loop,
    so it teaches nothing, and acceptance measured on it flatters.
    """
    whole = np.asarray(tokens)
    end = len(whole)
    for period in range(1, min(_LONGEST_PERIOD, len(whole) // _ROUNDS) + 1):
        differs = np.flatnonzero(whole[period:] != whole[:-period])
        start = 0 if not len(differs) else int(differs[-1]) + 1
        if len(whole) - start >= max(_ROUNDS * period, period + _LEAST_LOOP):
            end = min(end, start + 2 * period)
    return tokens[:end]


def _save_whole(path: Path, **arrays: np.ndarray) -> None:
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
    unfinished.rename(path)


def pack(texts: list[Written], length: int, rng: np.random.Generator) -> list[list[Written]]:
    """Texts in rows of at most `length` tokens, each in the first of the last rows that has room.

    Texts without a trained token are left out.
    """
    rows: list[list[Written]] = []
    room: list[int] = []
    for i in rng.permutation(len(texts)):
        one = texts[i]
        if not one.answer.any():
            continue
        first = max(0, len(rows) - _OPEN_ROWS)
        fits = (k for k in range(first, len(rows)) if room[k] >= len(one.tokens))
        k = next(fits, len(rows))
        if k == len(rows):
            rows.append([])
            room.append(length)
        rows[k].append(one)
        room[k] -= len(one.tokens)
    return rows


def _save(path: Path, rows: list[list[Written]], length: int) -> None:
    tokens = np.zeros((len(rows), length), np.uint32)
    answer = np.zeros((len(rows), length), bool)
    ends = np.zeros(len(rows), np.int32)
    for i, texts in enumerate(rows):
        ends[i] = sum(len(one.tokens) for one in texts)
        tokens[i, : ends[i]] = np.concatenate([one.tokens for one in texts])
        answer[i, : ends[i]] = np.concatenate([one.answer for one in texts])
    prompt = np.maximum(1, [row[0].prompt for row in rows]).astype(np.int32)
    _save_whole(path, tokens=tokens, prompt=prompt, length=ends, answer=answer)
