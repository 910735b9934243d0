"""Texts that continue from the prefix cache, beside the same texts computed as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.timing import Measurement, drive
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.sampling_params import SamplingParams

WARM = (
    *("cached_tokens", "acceptance_length_cold", "acceptance_differing"),
    *("acceptance_differing_again", "acceptance_differing_texts"),
)
"""Fields of a row that only warm runs have."""


@dataclass(frozen=True)
class WarmRun:
    """Outputs in two halves: `first` fills the cache, `warm` and `cold` continue it; `again` is cold too.

    Cold runs that differ from each other are a defect of another kind than the prefix cache's.
    """

    first: list[Request]
    warm: list[Request]
    cold: list[Request]
    again: list[Request]
    seconds: float

    @property
    def outputs(self) -> list[list[int]]:
        return [one.output + two.output for one, two in zip(self.first, self.warm, strict=True)]

    def as_row(self) -> dict:
        """Counts of the warm halves."""
        counts, cold = Acceptance.of(self.warm), Acceptance.of(self.cold)
        differing = _differing(self.warm, self.cold)
        return {
            "prompt_tokens": sum(len(request.prompt) for request in self.warm),
            "cached_tokens": sum(request.num_cached for request in self.warm),
            "rounds": counts.rounds,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "acceptance_length": counts.length,
            "acceptance_length_cold": cold.length,
            "acceptance_differing": len(differing),
            "acceptance_differing_again": len(_differing(self.cold, self.again)),
            # Number, prompt and cached tokens of each text.
            "acceptance_differing_texts": [
                (place, len(self.warm[place].prompt), self.warm[place].num_cached)
                for place in differing
            ],
            "acceptance_per_position": list(counts.rates),
            "seconds": self.seconds,
        }


def _differing(one: list[Request], other: list[Request]) -> list[int]:
    """Numbers of the texts with other drafts accepted, or another output."""
    facts = lambda request: (request.rounds, request.accepted_per_position, request.output)
    pairs = enumerate(zip(one, other, strict=True))
    return [place for place, (a, b) in pairs if facts(a) != facts(b)]


def warm_run(
    engine: Engine,
    prompts: Sequence[list[int]],
    reference: Sequence[list[int]],
    *,
    concurrency: int,
) -> WarmRun:
    """Decodes each text to the middle of its output, then from there on, warm, cold, and cold again.

    One group of `concurrency` texts at a time, so that slots still hold the windows of the texts.

    Args:
      prompts: token ids.
      reference: outputs, of which the first half is appended to the prompts; all of the same length.
    """
    size = len(reference[0])
    # One seed for all: a head with random weights draws by request which drafts are right.
    params = lambda count: SamplingParams(max_tokens=count, ignore_eos=True, seed=0)
    runs: list[tuple[Measurement, ...]] = []
    for start in range(0, len(prompts), concurrency):
        group = range(start, min(start + concurrency, len(prompts)))
        first = [prompts[i] for i in group]
        longer = [prompts[i] + reference[i][: size // 2] for i in group]
        one = lambda texts, count, reads: drive(
            engine, texts, params(count), concurrency=concurrency, reads_prefix_cache=reads
        )
        rest = size - size // 2
        runs.append(
            (
                one(first, size // 2, False),
                one(longer, rest, True),
                one(longer, rest, False),
                one(longer, rest, False),
            )
        )
    halves = ([r for run in runs for r in run[part].requests] for part in range(4))
    return WarmRun(*halves, seconds=sum(part.seconds for run in runs for part in run))
