"""The sequences of a request, as the engine gets them."""

from dataclasses import replace

from peagle_jax import SamplingParams
from serving.messages import Job
from serving.stream import Ask


def jobs_of(ask: Ask, number: int) -> list[Job]:
    """One job for each sequence; its key is `number` and its place among them."""
    # A caller cannot measure by time what others have asked for.
    salt = ask.caller, ask.cache_salt
    matchers = ask.matchers or [None] * ask.n
    return [
        Job((number, i), ask.prompt, _numbered(ask.params, i), salt, ask.priority, matchers[i])
        for i in range(ask.n)
    ]


def _numbered(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sequence `index` of a request: sequence 0 has the client's seed, others have their own."""
    if index == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)
