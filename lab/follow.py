"""`python -m lab follow`: drafts of a head that stays, and of one that learns, while their target
learns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax

from bench import rows
from bench.command import Command, RowOptions, option
from lab import report
from peagle_jax import Engine, EngineConfig, SamplingParams, logprobs
from peagle_jax.cli import plotting
from peagle_jax.cli.loading import load_weights
from peagle_jax.engine.host.completion import Completion
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.models import Decoder
from peagle_jax.training.rollouts import Rollouts, drafter_state, drafter_step, head_of, texts_of
from peagle_jax.training.stored_text import Text

PROMPTS = ("def add(a, b):\n    return", "x = [", "class Point:\n    def", "for i in range(")
_LONGEST = 128


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    """Options of this command.

    Args:
      steps: updates of the policy
      answers: answers of a prompt in a step
      max_tokens: tokens of an answer
      learning_rate: of the policy
      head_learning_rate: of the head that learns
      head_steps: updates of that head after each step
      seed: of the first answer
      figure: draw the rows of --out to this file instead
    """

    steps: int = 24
    answers: int = 8
    max_tokens: int = 32
    learning_rate: float = 3e-4
    head_learning_rate: float = 1e-3
    head_steps: int = 4
    seed: int = option(0, type=int)
    figure: Path | None = None
    out: Path = Path("follow.jsonl")


def run(options: Options) -> int:
    """Trains, a row each step, or draws the rows that are there."""
    if options.figure is not None:
        draw(report.read([options.out]), options.figure)
        return 0
    environment = options.environment()
    for row in follow(options):
        row = rows.rounded({"kind": "follow", **row, **environment})
        rows.append(options.out, row)
        shown = ("step", "reward", "frozen", "refreshed", "head_loss")
        print(", ".join(f"{name} {row[name]}" for name in shown), flush=True)
    return 0


def follow(options: Options) -> Iterator[dict]:
    """A policy gradient on the embedded model; both heads draft for the same policies.

    The reward is the share of tokens with an opening parenthesis.
    """
    policy, head, tokenizer = load_weights(None, None, method=None, dtype="float32")
    count = options.answers * len(PROMPTS)
    config = EngineConfig(
        num_draft=3,
        max_num_seqs=count,
        max_model_len=_LONGEST,
        prefill_rows=4,
        batch_sizes=(count,),
    )
    engines = {
        name: Engine(policy, head, config, tokenizer=tokenizer) for name in ("frozen", "refreshed")
    }
    prompts = [tokenizer.encode(text) for text in PROMPTS for _ in range(options.answers)]
    is_wanted = np.array(["(" in tokenizer.decode([i]) for i in range(policy.config.vocab_size)])
    optimizer = optax.adam(options.learning_rate)
    state = optimizer.init(policy)
    learning = drafter_state(head, learning_rate=options.head_learning_rate)
    update = jax.jit(_update, static_argnames="optimizer")
    for step in range(options.steps):
        asks = _asks(options, count, options.seed + step * count)
        written = {name: engine.generate(prompts, asks) for name, engine in engines.items()}
        done = written["refreshed"]
        rewards = np.array([is_wanted[one.tokens].mean() for one in done])
        text = texts_of(done, max(map(len, prompts)) + options.max_tokens)
        for _ in range(options.head_steps):
            learning, report = drafter_step(learning, Rollouts(policy, text))
        advantages = advantages_of(rewards, options.answers)
        policy, state = update(policy, state, text, advantages, optimizer=optimizer)
        engines["frozen"].update_weights(policy)
        engines["refreshed"].update_weights(policy, head=head_of(learning))
        total, weight = report["loss"]
        lengths = {name: _length(some) for name, some in written.items()}
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "head_loss": float(total / weight),
            **lengths,
        }


def _asks(options: Options, count: int, seed: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=options.max_tokens, temperature=1.0, ignore_eos=True, seed=seed + i
        )
        for i in range(count)
    ]


def advantages_of(rewards: np.ndarray, answers: int) -> np.ndarray:
    """Rewards less the mean of their prompt, in units of their spread."""
    groups = rewards.reshape(-1, answers)
    return (groups - groups.mean(1, keepdims=True)).ravel() / (rewards.std() + 1e-6)


def _update(policy: Decoder, state, text: Text, advantages, *, optimizer):
    def loss(policy):
        scores = logprobs(policy, text.tokens, text.prompt, text.length)
        return -(advantages * scores.sum(-1)).mean()

    change, state = optimizer.update(jax.grad(loss)(policy), state, policy)
    return optax.apply_updates(policy, change), state


def _length(done: Sequence[Completion]) -> float:
    return Acceptance.of(done).length


def draw(some: Sequence[dict], path: Path) -> None:
    """Acceptance lengths and rewards over steps."""
    figure, (lengths, rewards) = plotting.figure_with_panels(2)
    figure.set_size_inches(8, 3)
    steps = [row["step"] for row in some]
    for name in ("refreshed", "frozen"):
        lengths.plot(steps, [row[name] for row in some], label=f"{name} head")
    lengths.set(xlabel="step", ylabel="acceptance length, K = 3")
    lengths.legend()
    rewards.plot(steps, [row["reward"] for row in some])
    rewards.set(xlabel="step", ylabel="mean reward")
    figure.savefig(path, dpi=80)


COMMAND = Command(
    examples=("follow --steps 24", "follow --out lab/data/follow.jsonl --figure docs/follow.png"),
    description="""
A policy gradient on the embedded model, on the toy reward of notebooks/rollouts.ipynb. A row for
each step has the acceptance length of a head that stays as it is, and of one that drafter_step
trains on the texts of each step; both draft for the same policies, with the same seeds.
""",
    options=Options,
    run=run,
)
