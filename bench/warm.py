"""Texts that continue from the prefix cache, beside the same texts computed as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.timing import Measurement, drive
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.request import Request
from peagle_jax.engine.stats import Acceptance
from peagle_jax.sampling_params import SamplingParams

WARM = ("cached_tokens", "acceptance_length_cold", "acceptance_differing")
"""Fields of a row that only warm runs have."""


@dataclass(frozen=True)
class WarmRun:
    """Outputs in two halves: `first` fills the cache, `warm` and `cold` continue it."""

    first: list[Request]
    warm: list[Request]
    cold: list[Request]
    seconds: float

    @property
    def outputs(self) -> list[list[int]]:
        return [one.output + two.output for one, two in zip(self.first, self.warm, strict=True)]

    def as_row(self) -> dict:
        """Counts of the warm halves."""
        counts, cold = Acceptance.of(self.warm), Acceptance.of(self.cold)
        per_text = lambda some: [(r.rounds, r.accepted_per_position, r.output) for r in some]
        pairs = zip(per_text(self.warm), per_text(self.cold), strict=True)
        return {
            "prompt_tokens": sum(len(request.prompt) for request in self.warm),
            "cached_tokens": sum(request.num_cached for request in self.warm),
            "rounds": counts.rounds,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "acceptance_length": counts.length,
            "acceptance_length_cold": cold.length,
            "acceptance_differing": sum(one != other for one, other in pairs),
            "acceptance_per_position": list(counts.rates),
            "seconds": self.seconds,
        }


def warm_run(
    engine: Engine,
    prompts: Sequence[list[int]],
    reference: Sequence[list[int]],
    *,
    concurrency: int,
) -> WarmRun:
    """Decodes each text to the middle of its output, then from there on, warm and cold.

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
            (one(first, size // 2, False), one(longer, rest, True), one(longer, rest, False))
        )
    first, warm, cold = ([r for run in runs for r in run[part].requests] for part in range(3))
    return WarmRun(first, warm, cold, sum(part.seconds for run in runs for part in run))
