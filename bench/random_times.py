"""Round times that are drawn at random, so that the choice of K and of verified drafts changes in most rounds."""

import random
from collections.abc import Sequence

from peagle_jax.engine.calls import RoundShape
from peagle_jax.engine.round_times import RoundTimes


class RandomTimes(RoundTimes):
    """Every shape counts as timed, and gets another time whenever times are read."""

    def __init__(self):
        super().__init__()
        self._rng = random.Random(0)

    def untimed(self, shapes):
        return []

    def seconds_of(self, shapes: Sequence[RoundShape]) -> dict[RoundShape, float]:
        # A factor of ten and more between two of them outweighs the tokens of their drafts.
        return {shape: self._rng.lognormvariate(0, 2) for shape in shapes}
