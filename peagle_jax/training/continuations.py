"""Generates the drafters' training text with the target (`peagle-train continuations`).

Prompts are windows of the training files and function heads, continued to a fixed total length. All rows
of a batch decode at the same position. Inside a row's prompt the sampled token is replaced by the
prompt's token, so there is no separate prefill.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.models import Decoder
from peagle_jax.models.layers import AttentionRows
from peagle_jax.training.attention import heads_of
from peagle_jax.training.data import END_ID, PAD_ID
from peagle_jax.training.trainer import split_model

_SEGMENT, _MOST_SEGMENTS = 128, 4  # caches grow by segments, and each segment compiles a loop


@dataclass(frozen=True, kw_only=True)
class ContinuationOptions:
    """Number, length and prompts of the generated texts."""

    data: Path
    num: int
    num_heldout: int
    length: int
    batch: int
    min_prompt: int
    max_prompt: int
    header_share: float
    temperatures: tuple[float, ...]  # cycled over the training rows
    seed: int


class Prompts(NamedTuple):
    """tokens [n, max_prompt] uint16, length [n] int32."""

    tokens: np.ndarray
    length: np.ndarray


def line_starts(stream: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Positions that begin a document or a line at column 0."""
    size = tokenizer.get_vocab_size()
    ends_line = np.zeros(size, bool)
    for i in range(size):
        piece = tokenizer.decode([i], skip_special_tokens=False)
        ends_line[i] = i == END_ID or piece.endswith("\n")
    return np.concatenate([[0], np.flatnonzero(ends_line[stream[:-1]]) + 1])


def make_prompts(
    stream: np.ndarray,
    starts: np.ndarray,
    heads: Prompts,
    options: ContinuationOptions,
    count: int,
    rng: np.random.Generator,
) -> Prompts:
    """`header_share` of the prompts are function heads, the others windows inside one document."""
    width = options.max_prompt
    tokens = np.full((count, width), PAD_ID, np.uint16)
    length = np.zeros(count, np.int32)
    filled = 0
    fits = np.flatnonzero(heads.length <= width)
    if len(fits):
        filled = int(count * options.header_share)
        picked = rng.choice(fits, filled, replace=filled > len(fits))
        length[:filled] = heads.length[picked]
        copied = min(width, heads.tokens.shape[1])
        tokens[:filled, :copied] = heads.tokens[picked][:, :copied]
    ends = np.append(np.flatnonzero(stream == END_ID), len(stream))
    for row in range(filled, count):
        for _ in range(100):
            start = int(rng.choice(starts))
            room = int(ends[np.searchsorted(ends, start)]) - start
            if room >= options.min_prompt:
                break
        else:
            raise ConfigError(f"no document has {options.min_prompt} tokens; lower --min-prompt")
        n = min(room, int(rng.integers(options.min_prompt, width + 1)))
        tokens[row, :n] = stream[start : start + n]
        length[row] = n
    order = rng.permutation(count)
    return Prompts(tokens[order], length[order])


class _Contiguous:
    """`layers.Attend` for one token per row at position `at`; caches are pairs [B, K, S, H]."""

    def __init__(self, at: jax.Array):
        self.at = at

    def __call__(self, rows: AttentionRows, cache, *, window: int | None, scale: float, sinks):
        q, k, v = heads_of(rows, scale, sinks)
        B, _, N, H = q.shape
        K = k.shape[2]
        where = (0, 0, self.at, 0)
        write = lambda old, new: jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2), where)
        cache = (write(cache[0], k), write(cache[1], v))
        q = q.reshape(B, K, N // K, H)
        scores = jnp.einsum("bkgh,bksh->bkgs", q, cache[0], preferred_element_type=jnp.float32)
        key = jnp.arange(cache[0].shape[2])
        visible = key <= self.at
        if window is not None:
            visible &= key > self.at - window
        probs = jax.nn.softmax(jnp.where(visible, scores * H**-0.5, -1e30), axis=-1)
        out = jnp.einsum("bkgs,bksh->bkgh", probs.astype(q.dtype), cache[1])
        return out.reshape(B, 1, N, H), cache


def decode(merge, length: int, weights, prompt, prompt_length, temperature, key):
    """Continues a batch of prompts.

    Args:
      weights: of the target, in the dtype to compute in.
      prompt: [B, P] int32; prompt_length, temperature: [B].
    Returns:
      tokens [B, length], rows padded with PAD_ID after END_ID.
    """
    target: Decoder = merge(weights)
    config, B = target.config, prompt.shape[0]
    dtype = jax.tree.leaves(weights)[0].dtype
    prompt = jnp.pad(prompt, ((0, 0), (0, length - prompt.shape[1])), constant_values=PAD_ID)

    def step(carry, at):
        cache, token, done = carry
        positions = jnp.full((B, 1), at)
        hidden, _, cache = target(token[:, None], positions, cache, _Contiguous(at))
        logits = target.unembed(hidden[:, 0])
        noise = jax.random.gumbel(jax.random.fold_in(key, at), logits.shape)
        # Reserved ids must not be sampled.
        logits = logits.at[:, END_ID + 1 : PAD_ID + 6].set(-jnp.inf)
        chosen = jnp.argmax(logits + temperature[:, None] * noise, axis=-1).astype(jnp.int32)
        following = jnp.where(done, PAD_ID, chosen)
        given = at + 1 < prompt_length
        next_prompt = jax.lax.dynamic_index_in_dim(
            prompt, jnp.minimum(at + 1, length - 1), 1, False
        )
        following = jnp.where(given, next_prompt, following)
        done = done | (~given & (following == END_ID))
        return (cache, following, done), following

    empty = jnp.zeros((B, config.num_kv_heads, 0, config.head_dim), dtype)
    cache = [(empty, empty)] * config.num_layers
    carry = (cache, prompt[:, 0], jnp.zeros(B, bool))
    out = [prompt[:, :1]]
    segment = max(_SEGMENT, -(-length // _MOST_SEGMENTS))
    for start in range(0, length, segment):
        stop = min(start + segment, length)
        grow = lambda x, n=stop - start: jnp.pad(x, ((0, 0), (0, 0), (0, n), (0, 0)))
        carry = (jax.tree.map(grow, carry[0]), *carry[1:])
        carry, tokens = jax.lax.scan(step, carry, jnp.arange(start, stop))
        out.append(tokens.T)
    return jnp.concatenate(out, axis=1)[:, :length].astype(jnp.uint16)


def text_lengths(tokens: np.ndarray) -> np.ndarray:
    """Number of text tokens of each row, including the final END_ID."""
    return (tokens != PAD_ID).sum(axis=1).astype(np.int32)


def check_length(options: ContinuationOptions, config: TargetConfig) -> None:
    """Raises `ConfigError` for texts that are too short for the prompts or too long for the target."""
    if options.max_prompt >= options.length:
        raise ConfigError("--max-prompt must be smaller than --length")
    if options.length > config.max_position:
        raise ConfigError(
            f"--length {options.length} is above the target's max_position {config.max_position}"
        )


def generate(target: Decoder, options: ContinuationOptions, out: Path) -> dict[str, Path]:
    """Writes `train.npz` and `heldout.npz` (tokens, prompt, length, temperature).

    Finished batches are stored as parts, so a killed run resumes after the last one.

    Raises:
      ConfigError: the lengths do not fit the target, or no document is as long as a prompt.
    """
    check_length(options, target.config)
    out.mkdir(parents=True, exist_ok=True)
    weights, merge = split_model(target)
    run = jax.jit(partial(decode, merge, options.length))
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    heads = np.load(options.data / "headers.npz")
    written = {}
    for index, (name, total) in enumerate(
        (("heldout", options.num_heldout), ("train", options.num))
    ):
        rng = np.random.default_rng((options.seed, index))
        stream = np.load(options.data / f"{name}.npy")
        starts = line_starts(stream, tokenizer)
        given = Prompts(heads[f"{name}_tokens"], heads[f"{name}_length"])
        prompts = make_prompts(stream, starts, given, options, total, rng)
        cycle = (0.0,) if name == "heldout" else options.temperatures
        temperature = np.resize(np.array(cycle, np.float32), total)
        root = jax.random.fold_in(jax.random.key(options.seed), index)
        tokens = _decode_all(run, weights, prompts, temperature, root, options, out / name)
        np.savez(
            out / f"{name}.npz",
            tokens=tokens,
            prompt=prompts.length,
            length=text_lengths(tokens),
            temperature=temperature,
        )
        written[name] = out / f"{name}.npz"
    return written


def _decode_all(run, weights, prompts, temperature, root, options, folder: Path):
    """Decodes batch by batch; the next batch is dispatched before the last one is fetched."""
    folder.mkdir(exist_ok=True)
    total, B = len(prompts.length), min(options.batch, len(prompts.length))
    paths = [folder / f"part-{i:07d}.npy" for i in range(0, total, B)]
    waiting = None

    def fetch(path, tokens):
        partial_file = path.with_suffix(".tmp")
        with partial_file.open("wb") as file:
            np.save(file, np.asarray(tokens))
        partial_file.rename(path)

    for i, path in enumerate(tqdm(paths, desc=folder.name, unit="batch", mininterval=5.0)):
        if path.exists():
            continue
        # The last batch is padded with copies of the first rows.
        take = np.arange(i * B, (i + 1) * B) % total
        tokens = run(
            weights,
            prompts.tokens[take].astype(np.int32),
            prompts.length[take],
            temperature[take],
            jax.random.fold_in(root, i),
        )
        if waiting is not None:
            fetch(*waiting)
        waiting = (path, tokens)
    if waiting is not None:
        fetch(*waiting)
    return np.concatenate([np.load(path) for path in paths])[:total]
