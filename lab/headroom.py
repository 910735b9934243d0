"""`python -m lab headroom`: what a choice among a P-EAGLE head's candidates can gain.

The target writes texts, greedily or at a temperature. One pass of the head then drafts from every
place of them, and AL follows from the acceptance rule without any round:

- at temperature 0 the rounds of each text are walked through, as training simulates them;
- above it, let p be the target's law and q that of the drafts, given that all drafts before are the
  text's tokens x. Draft j is accepted with probability a_j = sum min(p, q). A token of the text was
  an accepted draft with probability r_i = min(1, q(x_i) / p(x_i)), so the expected AL is the mean
  over all places of 1 + sum_j a_j r_1 .. r_(j-1).

Each law chooses among the same candidates: the head alone ("marginal", argmax or drawn), its
selector, and the best law over the likeliest 8 or 16. The last knows the target's p: no selector
that sees only the head can reach it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import acceptance, rows
from bench.cells import Variant
from bench.command import Command, methods
from bench.models import Models
from bench.printed import show_table
from bench.sweep import prompts_of, sampling
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import candidate_scores
from peagle_jax.method.selector import candidates, rows_of, walk
from peagle_jax.models import Decoder
from peagle_jax.training.acceptance import lengths
from peagle_jax.training.drafter import all_rows
from peagle_jax.training.objective import by_chunk
from peagle_jax.training.passes import HeadOptions, run_target, slot_is_trained, unembedding
from peagle_jax.training.recipe import loss_chunk
from peagle_jax.training.stored_text import Text
from peagle_jax.training.stored_text import rows_of as texts_of

_BATCH = 4
"""Texts of a pass."""
_ROUND = 64
"""Texts are padded to a multiple of this many tokens, so that few passes compile."""


@dataclass(frozen=True, kw_only=True)
class Options(acceptance.Options):
    """Options of this command: those of `peagle-bench acceptance`."""

    methods: tuple[str, ...] = methods(("peagle",))
    k: tuple[int, ...] = (3, 5, 7, 15)
    out: Path = Path("headroom.jsonl")

    def check(self) -> None:
        super().check()
        if self.methods != ("peagle",):
            raise ConfigError("--methods: only a P-EAGLE head drafts all positions at once")


def run(options: Options) -> int:
    """Measures, a row for each set, law and K, and prints them."""
    environment, models = options.environment(), Models.load(options)
    done = []
    for spec in options.sets:
        name, texts = _written(models, spec, options)
        for law, by_k in headroom(models, texts, options).items():
            for num_draft, values in by_k.items():
                identity = models.identity(
                    options, prompts=name, variant=Variant("peagle", num_draft), concurrency=_BATCH
                )
                row = {"kind": "headroom", **identity, "law": law, **values, **environment}
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    show_table(["set", "law", *(f"K = {k}" for k in options.k)], _lines(done), options.out)
    return 0


def _lines(done: list[dict]) -> list[list[str]]:
    """A line for each set and law: AL, and behind it that of fresh rounds."""
    lines: dict[tuple, list[str]] = {}
    for row in done:
        fresh = row.get("fresh_acceptance_length")
        shown = f"{row['acceptance_length']:.2f}" + (f" ({fresh:.2f})" if fresh else "")
        lines.setdefault((row["set"], row["law"]), []).append(shown)
    return [[*key, *values] for key, values in lines.items()]


def _written(models: Models, spec: str, options: Options) -> tuple[str, Text]:
    """A prompt set's name, and its prompts with what the target writes after them."""
    params = sampling(options)
    config = EngineConfig(
        max_num_seqs=options.concurrency,
        max_model_len=options.max_model_len,
        programs_folder=options.programs_folder,
    )
    name, prompts, _ = prompts_of(models, options, spec, config, options.num_prompts)
    done = models.engine("none", 0, config).generate(prompts, params)
    return name, as_text(prompts, [one.tokens for one in done])


def as_text(prompts: list[list[int]], answers: list[list[int]]) -> Text:
    """Prompts with their answers, the shortest first."""
    pairs = list(zip(prompts, answers, strict=True))
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    given = np.array([len(prompt) for prompt, _ in pairs])
    ends = given + [len(answer) for _, answer in pairs]
    tokens = np.zeros((len(pairs), -(-ends[-1] // _ROUND) * _ROUND), np.int32)
    for row, (prompt, answer), end in zip(tokens, pairs, ends, strict=True):
        row[:end] = [*prompt, *answer]
    return Text(tokens, given, ends)


def headroom(models: Models, texts: Text, options: Options) -> dict[str, dict[int, dict]]:
    """Law -> K -> acceptance lengths."""
    found = drafted(models, texts, max(options.k), options.temperature)
    summary = expected if options.temperature else lengths
    return {law: {k: summary(values, texts, k) for k in options.k} for law, values in found.items()}


def drafted(models: Models, texts: Text, num_draft: int, temperature: float = 0.0) -> dict:
    """What the head drafts at every place of texts.

    Returns:
      Law -> [n, K, S] bool, whether a greedy draft is the text's token; above temperature 0 law ->
      (accepted, kept, used), each [n, K, S]: the chance that a draft is accepted, min(1, q / p) of
      the text's token, and whether the place exists.
    """
    options = HeadOptions(
        texts=Path(),
        batch=_BATCH,
        num_depths=num_draft,
        dtype=models.dtype,
        loss_chunk=loss_chunk(models.target.config.vocab_size),
        repeat_weight=1,
    )
    measure = jax.jit(partial(_measured, options=options, temperature=temperature))
    parts, (count, width) = [], texts.tokens.shape
    for start in range(0, count, _BATCH):
        piece = texts_of(texts, slice(start, start + _BATCH))
        short = piece.tokens[:, : -(-int(piece.length.max()) // _ROUND) * _ROUND]
        found = measure(models.heads["peagle"], models.target, piece._replace(tokens=short))
        beside = ((0, 0), (0, 0), (0, width - short.shape[1]))
        parts.append(jax.tree.map(lambda x: np.pad(x, beside), jax.device_get(found)))  # noqa: B023
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def expected(found: tuple, texts: Text, num_draft: int) -> dict[str, float]:
    """The mean over all places that are followed by all drafts of the longest K."""
    whole = found[2].all(axis=1)
    accepted, kept = (x[:, :num_draft] for x in found[:2])
    before = np.cumprod(kept, axis=1)[:, :-1]
    reached = np.concatenate([np.ones_like(kept[:, :1]), before], axis=1)
    tokens = 1 + (reached * accepted).sum(1)
    return dict(acceptance_length=float((tokens * whole).sum() / max(whole.sum(), 1)))


def _measured(
    head: DraftHead, target: Decoder, text: Text, *, options: HeadOptions, temperature: float
) -> dict:
    """`drafted` of a piece."""
    run = run_target(target, text, head.config.taps or target.config.default_taps)
    rows = all_rows(head, target, run, slot_is_trained(text), options)
    (B, S), K = run.tokens.shape, options.num_depths
    by_depth = lambda x: x.reshape(B, K, S, *x.shape[2:])
    chains = lambda x: jnp.moveaxis(by_depth(x), 1, 2).reshape(B * S, K, *x.shape[2:])
    following = jnp.pad(run.tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    normed = run.normed.reshape(B * S, -1)

    def one(piece):
        out, at = piece
        logits = head.logits(target, out)
        if temperature == 0:
            return _choices(head, target, out, logits, following[at])
        wanted = _capped(normed[at] @ unembedding(target).T, target)
        laws = jax.nn.softmax(wanted.astype(jnp.float32) / temperature)
        return _chances(head, target, out, logits, laws, following[at], temperature)

    chunk = max(1, options.loss_chunk // K)
    found = by_chunk(one, (chains(rows.out), chains(rows.at)), chunk)
    found = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(B, S, K), 1, 2), found)
    used = by_depth(rows.used)
    if temperature == 0:
        return {law: match & used for law, match in found.items()}
    return {law: (*pair, used) for law, pair in found.items()}


def _capped(logits: jax.Array, target: Decoder) -> jax.Array:
    cap = target.config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _choices(head, target, out, logits, token) -> dict[str, jax.Array]:
    """Law -> [R, K] bool, of greedy drafts; token [R, K] of the text."""
    ids, _ = candidates(logits, head.config.draft_vocab_size)
    hit = head.to_target_ids(ids) == token[..., None]
    found = {"marginal": hit[..., 0]}
    if head.selector is not None:
        scores = candidate_scores(head, target, out, logits)[1]
        taken = walk(jnp.argmax(scores, axis=-1).astype(jnp.int32))
        found["selector"] = jnp.take_along_axis(hit, taken[..., None], -1)[..., 0]
    return found | {f"best of {n}": hit[..., :n].any(-1) for n in (8, 16)}


def _chances(head, target, out, logits, p, token, temperature) -> dict[str, tuple]:
    """Law -> (chance that a draft is accepted, min(1, q / p) of the text's token), each [R, K]."""
    ids, _ = candidates(logits, head.config.draft_vocab_size)
    ids_of = head.to_target_ids(ids)
    of_candidate = jnp.take_along_axis(p, ids_of, -1)
    hit = ids_of == token[..., None]
    of_token = jnp.take_along_axis(p, token[..., None], -1)[..., 0]
    drafted = head.to_target_ids(jnp.arange(head.config.draft_vocab_size))
    q = jax.nn.softmax(logits / temperature)
    at_token = (q * (drafted == token[..., None])).sum(-1)
    one = lambda place: (
        jnp.take_along_axis(of_candidate, place[..., None], -1)[..., 0],
        jnp.take_along_axis(hit, place[..., None], -1)[..., 0].astype(jnp.float32),
    )
    drawn = lambda law, of_law, of_token_law: (
        jnp.minimum(of_law, law).sum(-1),
        jnp.minimum(1.0, of_token_law / of_token),
    )
    found = {"marginal": one(jnp.zeros(token.shape, jnp.int32))}
    found["marginal, drawn"] = drawn(q, p[..., drafted], at_token)
    if head.selector is not None:
        scores = candidate_scores(head, target, out, logits)[1]
        row = rows_of(scores, jnp.argmax(hit, -1))
        found["selector"] = one(jnp.argmax(row, -1))
        law = jax.nn.softmax(row / temperature)
        found["selector, drawn"] = drawn(law, of_candidate, (law * hit).sum(-1))
    best = lambda n: (of_candidate[..., :n].sum(-1), hit[..., :n].any(-1).astype(jnp.float32))
    return found | {f"best of {n}": best(n) for n in (8, 16)}


COMMAND = Command(
    examples=("headroom --sets HumanEval --num-prompts 20", "headroom --temperature 1 -K 7"),
    description="""
Lets the target write texts and computes, without rounds, the acceptance length (AL) of drafts that
choose among the candidates of a P-EAGLE head: the head alone, its selector, and the best choice
among the likeliest 8 or 16 tokens of each position. In parentheses: fresh AL.
""",
    options=Options,
    run=run,
)
