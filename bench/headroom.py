"""`peagle-bench headroom`: acceptance of a head and its upper bounds, from one pass over greedy texts.

The target writes a greedy text for every prompt. One pass of target and head over the texts gives, at
every anchor and depth, the rank of the target's token among the head's candidates and the head's
confidence. The engine's rounds are then simulated on these numbers.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench import rows
from bench.commands.headroom import Options
from bench.sweep import Models, check_rounds, prompt_set
from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from peagle_jax.cli import runs
from peagle_jax.config import EngineConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.training.acceptance import (
    Earlier,
    Rounds,
    earlier,
    leading,
    ngram_run,
    repeats,
    walk,
)
from peagle_jax.training.drafter import all_rows
from peagle_jax.training.passes import DrafterOptions, run_target, slot_is_trained
from peagle_jax.training.selector import selected_of
from peagle_jax.training.stored_text import Text
from peagle_jax.training.target import unembedding
from peagle_jax.training.trainer import split_model

TOP = (1, 2, 4, 8, 16)
NGRAM = dict(min_match=6, num_draft=15)
_BINS = 10
_TEXTS_AT_ONCE = 8
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Measured:
    """A head's predictions on texts, [B, K, S] by text, depth and anchor."""

    text: Text
    found: list[Earlier]
    # int, rank of the target's choice among the head's candidates; 0 is the head's choice
    rank: np.ndarray
    confidence: np.ndarray  # float32, the head's largest probability
    # bool, whether the selector's choice is the target's; None: the head has no selector
    selected: np.ndarray | None = None

    @property
    def num_draft(self) -> int:
        return self.rank.shape[1]

    def walk(self, top: int = 1) -> Rounds:
        """Rounds of an ideal drafter that picks the right token whenever it is among its `top` candidates."""
        return self._rounds(self.rank < top)

    def walk_selected(self) -> Rounds:
        """Rounds of the head with its selector."""
        return self._rounds(self.selected)

    def _rounds(self, right: np.ndarray) -> Rounds:
        return walk(leading(right, self.num_draft), self.text.prompt, self.text.length)

    def is_repeat(self, rounds: Rounds) -> np.ndarray:
        return repeats(self.found, self.rank.shape[2])[rounds.text, rounds.slot]


def greedy_texts(models: Models, prompts: list, options: Options) -> Text:
    """The target's own greedy continuations, `options.max_tokens` each, padded to the longest."""
    config = EngineConfig(max_num_seqs=options.concurrency, max_model_len=options.max_model_len)
    engine = models.engine("none", 0, config)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=options.ignore_eos)
    done = engine.generate(prompts, params)
    texts = [[*one.prompt, *one.tokens] for one in done]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    prompt = np.array([len(one.prompt) for one in done], np.int32)
    return Text(tokens, prompt, np.array([len(text) for text in texts], np.int32))


def stored_texts(path: Path | None, write) -> Text:
    """Reads a `Text` from an npz file; where there is none, keeps what `write()` returns in it."""
    if path is not None and path.exists():
        with np.load(path) as file:
            return Text(file["tokens"], file["prompt"], file["length"])
    text = write()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **text.arrays())
    return text


def _candidates(head, target, run, found, num_draft: int):
    """(rank, confidence), each [B, num_draft, S], of the rows of a head."""
    B, S = run.tokens.shape
    normed = run.normed.reshape(-1, run.normed.shape[-1])
    columns = head.to_target_ids(jnp.arange(head.config.draft_vocab_size))

    def chunk(pair):
        out, at = pair
        z = head.logits(target, out)
        wanted = jnp.argmax(linear(normed[at], unembedding(target), out_dtype=jnp.float32), -1)
        is_wanted = columns == wanted[:, None]
        own = jnp.where(is_wanted, z, -jnp.inf).max(-1, keepdims=True)
        before = jnp.arange(z.shape[-1]) < jnp.argmax(is_wanted, -1)[:, None]
        rank = ((z > own) | ((z == own) & before)).sum(-1)
        return rank, jnp.exp(z.max(-1) - jax.nn.logsumexp(z, axis=-1))

    num_rows = B * num_draft * S
    size = min(_ROWS_AT_ONCE, num_rows)
    pad = -num_rows % size
    cut = lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])
    flat = lambda x: x.reshape(num_rows, *x.shape[2:])
    scores = jax.lax.map(chunk, (cut(flat(found.out)), cut(flat(found.at))))
    return tuple(x.reshape(-1)[:num_rows].reshape(B, num_draft, S) for x in scores)


def _options(head: DraftHead, dtype: str, num_draft: int) -> DrafterOptions:
    windows = head.config.sliding_windows
    return DrafterOptions(
        continuations=Path(), batch=1, num_depths=num_draft, rate=1.0, min_rate=0.0, step_decay=1.0,
        dtype=dtype, attention="auto", query_chunk=None, loss_chunk=1,
        eval_sequences=1, num_draft=num_draft,
        elements="texts" if windows is None or not any(windows) else "anchors",
    )  # fmt: skip


def measure(
    target: Decoder, head: DraftHead, text: Text, *, num_draft: int, dtype: str, bucket: int
) -> Measured:
    """One pass over all texts, in groups of similar length; lengths are padded to multiples of `bucket`."""
    taps = head.config.taps or target.config.default_taps
    options, selects = _options(head, dtype, num_draft), head.selector is not None
    of_target, of_head = split_model(target), split_model(head)

    @jax.jit
    def scores(target_weights, head_weights, text):
        target, head = of_target[1](target_weights), of_head[1](head_weights)
        with dispatch.references():  # thousands of rows: no shape of a serving round
            run = run_target(target, text, taps)
            found = all_rows(head, target, run, slot_is_trained(text), options)
            ranked = _candidates(head, target, run, found, num_draft)
            if not selects:
                return ranked
            return *ranked, selected_of(head, target, run, found, num_draft, _ROWS_AT_ONCE)

    count, longest = text.tokens.shape
    shape = (count, num_draft, longest)
    arrays = [np.full(shape, np.iinfo(np.int32).max), np.zeros(shape, np.float32)]
    arrays += [np.zeros(shape, bool)] * selects
    order = np.argsort(-text.length, kind="stable")
    for start in tqdm(range(0, count, _TEXTS_AT_ONCE), desc=head.config.method, disable=None):
        chosen = order[start : start + _TEXTS_AT_ONCE]
        width = -(-int(text.length[chosen].max()) // bucket) * bucket
        filled = np.resize(chosen, _TEXTS_AT_ONCE)
        tokens = np.zeros((_TEXTS_AT_ONCE, width), np.int32)
        used = min(width, longest)
        tokens[:, :used] = text.tokens[filled][:, :used]
        piece = Text(tokens, text.prompt[filled], text.length[filled])
        got = jax.device_get(scores(of_target[0], of_head[0], piece))
        for whole, part in zip(arrays, got, strict=True):
            whole[chosen, :, :used] = part[: len(chosen), :, :used]
    found = [earlier(row[:n]) for row, n in zip(text.tokens, text.length, strict=True)]
    return Measured(text, found, *arrays)


def _histogram(rounds: Rounds, num_draft: int) -> list[int]:
    return np.bincount(rounds.accepted, minlength=num_draft + 1).tolist()


def _by_position(measured: Measured, rounds: Rounds) -> dict:
    """Recall of the right token, and calibration of the head's probability, by draft position."""
    at = rounds.text, slice(None), rounds.slot
    rank, confidence = measured.rank[at], measured.confidence[at]  # [rounds, K]
    exists = (
        rounds.slot[:, None] + 3 + np.arange(measured.num_draft)
        <= (measured.text.length[rounds.text][:, None])
    )
    # The draft at position i matters only if all drafts before it are right.
    before = np.cumprod(np.pad(rank[:, :-1] == 0, ((0, 0), (1, 0)), constant_values=True), axis=1)
    reached = exists & (before == 1)
    bins, errors = [], []
    for i in range(measured.num_draft):
        sure, right = confidence[reached[:, i], i], rank[reached[:, i], i] == 0
        where = np.minimum((sure * _BINS).astype(int), _BINS - 1)
        total = np.bincount(where, minlength=_BINS)
        said, true = (np.bincount(where, x, minlength=_BINS) for x in (sure, right))
        bins.append(dict(drafts=total.tolist(), confidence=said.tolist(), right=true.tolist()))
        errors.append(float(np.abs(said - true).sum() / max(len(sure), 1)))
    share = lambda top, i: (
        float((rank[exists[:, i], i] < top).mean()) if exists[:, i].any() else 0.0
    )
    positions = range(measured.num_draft)
    return dict(
        recall={top: [share(top, i) for i in positions] for top in TOP},
        calibration=bins,
        calibration_error=errors,
    )


def _with_ngrams(measured: Measured) -> dict:
    """Acceptance length with drafts copied from the text: alone, and with the head where none match."""
    text = measured.text
    alone = np.zeros(text.tokens.shape, np.int64)
    matched = np.zeros(text.tokens.shape, bool)
    for i, one in enumerate(measured.found):
        n = text.length[i]
        alone[i, :n], matched[i, :n] = ngram_run(text.tokens[i, :n], one, **NGRAM)
    head = np.cumprod(measured.rank == 0, axis=1).sum(axis=1)
    length = lambda run: walk(run, text.prompt, text.length).acceptance_length
    return dict(
        **NGRAM,
        acceptance_length=length(alone),
        hybrid_acceptance_length=length(np.where(matched, alone, head)),
    )


def summary(measured: Measured) -> dict:
    """The row of a head on a set of texts."""
    rounds = measured.walk()
    repeat = measured.is_repeat(rounds)
    parts = dict(all=rounds, fresh=rounds.take(~repeat), repeat=rounds.take(repeat))
    oracle = {top: measured.walk(top) for top in TOP}
    fresh = lambda some: some.take(~measured.is_repeat(some)).acceptance_length
    by_text = [rounds.accepted[rounds.text == i].tolist() for i in range(len(measured.found))]
    accepted = np.arange(1, measured.num_draft + 1)
    chosen = None if measured.selected is None else measured.walk_selected()
    return dict(
        texts=len(by_text),
        tokens=int((measured.text.length - measured.text.prompt).sum()),
        rounds=len(rounds.text),
        acceptance_length=rounds.acceptance_length,
        fresh_acceptance_length=parts["fresh"].acceptance_length,
        repeat_acceptance_length=parts["repeat"].acceptance_length,
        repeat_share=float(parts["repeat"].emitted.sum() / max(rounds.emitted.sum(), 1)),
        acceptance_per_position=[float((rounds.accepted >= i).mean()) for i in accepted],
        oracle_acceptance_length={top: some.acceptance_length for top, some in oracle.items()},
        oracle_fresh_acceptance_length={top: fresh(some) for top, some in oracle.items()},
        selected_acceptance_length=chosen and chosen.acceptance_length,
        selected_fresh_acceptance_length=chosen and fresh(chosen),
        **_by_position(measured, rounds),
        ngram=_with_ngrams(measured),
        accepted_histogram={k: _histogram(some, measured.num_draft) for k, some in parts.items()},
        accepted_by_text=by_text,
    )


def headroom(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows."""
    models = Models.load(options)
    done = []
    for spec in options.sets:
        name, prompts = prompt_set(
            spec,
            models.tokenizer,
            prompt_tokens=options.prompt_tokens,
            limit=options.num_prompts,
            chat=models.uses_chat(options),
        )
        stored = None if options.texts is None else options.texts / f"{name}.npz"
        text = stored_texts(stored, partial(greedy_texts, models, prompts, options))
        for method, head in models.heads.items():
            for num_draft in options.k:
                found = measure(
                    models.target, head, text, num_draft=num_draft, dtype=models.dtype, bucket=128
                )
                check_rounds(dict(set=name, method=method, rounds=len(found.walk().text)))
                row = dict(
                    kind="headroom",
                    **models.identity(
                        options,
                        prompts=name,
                        variant=(method, num_draft),
                        concurrency=options.concurrency,
                    ),
                    **summary(found),
                    **environment,
                )
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    return done


def table(done: list[dict]) -> str:
    """Rows as text."""
    header = ["set", "method", "K", "AL", "fresh", "repeats", "top 2", "4", "8", "16"]
    header += ["n-gram", "hybrid", "off by"]
    lines = []
    for row in done:
        oracle = row["oracle_acceptance_length"]
        ngram = row["ngram"]
        lines.append(
            [
                row["set"],
                runs.METHOD_NAMES[row["method"]],
                str(row["num_speculative_tokens"]),
                f"{row['acceptance_length']:.2f}",
                f"{row['fresh_acceptance_length']:.2f}",
                f"{100 * row['repeat_share']:.0f} %",
                *(f"{oracle[top]:.2f}" for top in TOP[1:]),
                f"{ngram['acceptance_length']:.2f}",
                f"{ngram['hybrid_acceptance_length']:.2f}",
                f"{np.mean(row['calibration_error']):.3f}",
            ]
        )
    return runs.table(header, lines)
