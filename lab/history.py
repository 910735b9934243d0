"""`python -m lab history`: what drafts copied from earlier texts of a caller would gain.

The model does repeated work, and all of it is recorded. A model without a chat template repairs
functions of HumanEval: an attempt's error goes back with the attempt, and the function begins anew.
It also samples the same functions several times, as a step of reinforcement learning does. A chat
model edits files, and writes the whole file each time.

Rounds are then simulated over the recorded answers. Drafts come from the head ("head"), from the
longest match of the newest tokens in the same text ("text") or also in all earlier texts of the
scene ("history"), with the most frequent continuation; or from a match of at least 8 tokens, and
else from the head. A draft is accepted if it is the next token, which for copied drafts is the
engine's rule at every temperature.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import rows
from bench.command import Command, SweepOptions, methods, show
from bench.models import Models
from bench.sweep import sampling
from lab import sandbox
from lab.headroom import as_text, drafted
from lab.humaneval import STOP, Problem, problems
from peagle_jax.config import EngineConfig
from peagle_jax.training.acceptance import leading

_LEAST = 3
"""Tokens of the shortest match."""
_MOST = 64
"""Tokens of the longest match that is looked for."""
_SURE = 8
"""Tokens of a match that is preferred to the head's drafts."""


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    """Options of this command.

    Args:
      num_prompts: functions, or files
      turns: attempts or edits of each; samples of each
      concurrency: requests at once
    """

    methods: tuple[str, ...] = methods(("peagle",))
    k: tuple[int, ...] = (3, 5, 7, 15)
    num_prompts: int = 20
    turns: int = 3
    concurrency: int = 8
    out: Path = Path("history.jsonl")


class Exchange(NamedTuple):
    """A request and its answer, as tokens."""

    scene: str
    prompt: list[int]
    answer: list[int]


def run(options: Options) -> int:
    """Records, simulates, and prints a row for each scene, source and K."""
    environment, models = options.environment(), Models.load(options)
    done = []
    for scene, exchanges in _recorded(models, options).items():
        for source, by_k in simulated(models, exchanges, options.k).items():
            for num_draft, length in by_k.items():
                identity = models.identity(
                    options, prompts=scene, variant=("peagle", num_draft), concurrency=1
                )
                row = {"kind": "history", **identity, "source": source, **environment}
                row |= {"acceptance_length": length, "answers": len(exchanges)}
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    lines = defaultdict(list)
    for row in done:
        lines[row["set"], row["source"]].append(f"{row['acceptance_length']:.2f}")
    header = ["scene", "drafts", *(f"K = {k}" for k in options.k)]
    show(header, [[*key, *values] for key, values in lines.items()], options.out)
    return 0


def _recorded(models: Models, options: Options) -> dict[str, list[Exchange]]:
    """Scene -> exchanges in their order."""
    size = EngineConfig(max_num_seqs=options.concurrency, max_model_len=options.max_model_len)
    engine, params = models.engine("none", 0, size), sampling(options)
    chosen = problems(limit=options.num_prompts)

    def ask(scene: str, prompts: list[list[int]], given) -> list[Exchange]:
        done = engine.generate(prompts, given)
        return [
            Exchange(scene, prompt, list(one.tokens))
            for prompt, one in zip(prompts, done, strict=True)
        ]

    text = models.tokenizer.decode
    if models.uses_chat(options):
        return {"edits": _edits(models, chosen, options.turns, lambda p: ask("edits", p, params))}
    params = replace(params, stop=STOP)
    encode = lambda texts: [models.tokenizer.encode(one) for one in texts]
    repairs, prompts = [], [one.prompt for one in chosen]
    for _ in range(options.turns):
        new = ask("repairs", encode(prompts), params)
        repairs += new
        tried = zip(chosen, prompts, new, strict=True)
        prompts = [_again(one, prompt, text(found.answer)) for one, prompt, found in tried]
    repeated = encode([one.prompt for one in chosen for _ in range(options.turns)])
    sampled = [replace(params, temperature=0.7, seed=i) for i in range(len(repeated))]
    return {"repairs": repairs, "samples": ask("samples", repeated, sampled)}


def _again(problem: Problem, prompt: str, attempt: str) -> str:
    """The next prompt: all so far, what is wrong, and the function's beginning."""
    outcome = sandbox.run(problem.program(attempt))
    error = "passed" if outcome.status == "passed" else outcome.detail
    return f"{prompt}{attempt}\n\n# {error}\n# Once more:\n{problem.prompt}"


def _edits(
    models: Models, chosen: list[Problem], turns: int, ask: Callable[[list], list[Exchange]]
) -> list[Exchange]:
    """A chat for each function."""
    wholly = "Answer with the whole file."
    chats = [
        [dict(role="user", content=f"```python\n{one.prompt}\n    pass\n```\n{task} {wholly}")]
        for one in chosen
        for task in [f"Rename {one.entry_point} to solve."]
    ]
    done = []
    for _ in range(turns):
        new = ask([models.tokenizer.chat(chat) for chat in chats])
        done += new
        for chat, found in zip(chats, new, strict=True):
            chat.append(dict(role="assistant", content=models.tokenizer.decode(found.answer)))
            chat.append(dict(role="user", content=f"Write a shorter docstring. {wholly}"))
    return done


def simulated(
    models: Models, exchanges: Sequence[Exchange], ks: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Source of drafts -> K -> AL over all answers."""
    most, texts = max(ks), Texts()
    heads = _of_head(models, exchanges, most) if models.heads else [None] * len(exchanges)
    emitted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for one, head in zip(exchanges, heads, strict=True):
        start, given = len(texts.tokens), len(one.prompt)
        texts.add([*one.prompt, *one.answer])
        places = range(start + given, len(texts.tokens))
        correct = {}
        for name, first in (("text", start), ("history", 0)):
            copied = [texts.copied(first, place, most) for place in places]
            right = np.array(
                [texts.correct(at, one) for at, (one, _) in zip(places, copied, strict=True)]
            )
            length = np.array([length for _, length in copied])
            correct[name] = right
            if head is not None:
                own = head[given - 1 :][: len(right)]
                correct |= {"head": own, f"{name}, else head": np.where(length < _SURE, own, right)}
        for name, right in correct.items():
            for k in ks:
                emitted[name, k] += _walk(right, k)
        texts.add([-1])
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, k), counts in emitted.items():
        found[name][k] = sum(counts) / max(len(counts), 1)
    return found


def _of_head(models: Models, exchanges: Sequence[Exchange], most: int) -> list[np.ndarray]:
    """Of each exchange the number of the head's correct drafts at each slot, [S]."""
    prompts, answers = ([one[i] for one in exchanges] for i in (1, 2))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    match = drafted(models, as_text(prompts, answers), most)
    correct = leading(match.get("selector", match["marginal"]), most)
    return [correct[order.index(i)] for i in range(len(order))]


def _walk(correct: np.ndarray, k: int) -> list[int]:
    """Tokens of each round of an answer.

    Args:
      correct: [n], of the n tokens of the answer, correct drafts behind each.
    """
    at, last, emitted = 0, len(correct) - 2, []
    while at <= last:
        emitted.append(min(int(correct[at]), k, last - at) + 1)
        at += emitted[-1]
    return emitted


class Texts:
    """Texts one behind the other, -1 between them, with the places of each 3-gram."""

    def __init__(self):
        self.tokens: list[int] = []
        self._places = defaultdict(list)

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens behind all others."""
        for token in tokens:
            self.tokens.append(token)
            self._places[tuple(self.tokens[-_LEAST:])].append(len(self.tokens) - 1)

    def correct(self, newest: int, drafts: Sequence[int]) -> int:
        """How many drafts are the tokens after place `newest`, up to the first that is not."""
        following = self.tokens[newest + 1 : newest + 1 + len(drafts)]
        same = [draft == token for draft, token in zip(drafts, following, strict=False)]
        return [*same, False].index(False)

    def copied(self, first: int, newest: int, count: int) -> tuple[list[int], int]:
        """(drafts after place `newest`, tokens of their match), from places `first` on."""
        tokens, best, places = self.tokens, 0, []
        for place in self._places[tuple(tokens[newest - _LEAST + 1 : newest + 1])]:
            if first <= place < newest:
                length = self._match(place, newest)
                if length >= best:
                    places = [*places, place] if length == best else [place]
                    best = length
        drafts: list[int] = []
        while len(drafts) < count:
            places = [place + 1 for place in places if place < newest]
            votes = Counter(tokens[place] for place in reversed(places))
            if not votes or (token := votes.most_common(1)[0][0]) < 0:
                break
            drafts.append(token)
            places = [place for place in places if tokens[place] == token]
        return drafts, best

    def _match(self, place: int, newest: int) -> int:
        length = 0
        while length < min(_MOST, place + 1) and self.tokens[newest - length] >= 0:
            if self.tokens[place - length] != self.tokens[newest - length]:
                break
            length += 1
        return length


COMMAND = Command(
    examples=("history --num-prompts 10", "history --turns 4 -K 7"),
    description="""
Lets the model do repeated work (repairs and samples of HumanEval's functions; edits of files with a
chat model), and simulates rounds whose drafts are copied from the same text, or from all earlier
texts too, beside those of the head.
""",
    options=Options,
    run=run,
)
