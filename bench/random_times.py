"""Round times that are drawn at random, so that the choice of K changes in most rounds."""

import random
from collections.abc import Collection

from peagle_jax.engine.host.round_times import RoundTimes


class RandomTimes(RoundTimes):
    """Every shape counts as timed, and gets another time whenever times are read."""

    def __init__(self):
        super().__init__()
        self._rng = random.Random(0)

    def untimed(self, shapes):
        return []

    def seconds(self, size: int, drafts: Collection[int]) -> dict[int, float]:
        # A factor of ten and more between two of them outweighs the tokens of their drafts.
        return {num_draft: self._rng.lognormvariate(0, 2) for num_draft in drafts}
