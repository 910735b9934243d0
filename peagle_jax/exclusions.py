"""Options of an engine that exclude each other, or that have no effect without another one."""

from collections.abc import Callable

from peagle_jax.errors import ConfigError
from peagle_jax.removed import check_choice

ADAPTIVE = ("off", "load")
"""Choice of K at run time: none, or by load (`engine.host.k_by_load`)."""

Rule = tuple[Callable[[object], bool], str]

_RULES: tuple[Rule, ...] = (
    (
        lambda config: min(config.max_logprobs, config.saved_rings or 0) < 0,
        "max_logprobs and saved_rings must not be negative",
    ),
    (
        lambda config: config.verify_method == "token" and config.draft_sampling == "argmax",
        "verify_method token is for drawn drafts: set draft_sampling to sample, or leave it out",
    ),
    (
        lambda config: config.repeat > 1 and config.greedy_rounds is False,
        "rounds_per_call above 1 is for greedy rounds: it excludes greedy_rounds False",
    ),
    (
        lambda config: config.long_prefills and not config.small_prefills,
        "long_prefills has no effect without small_prefills: leave it out",
    ),
    (
        lambda config: config.saved_rings and not config.prefix_caching,
        "saved_rings has no effect without prefix_caching: leave it out",
    ),
    (
        lambda config: config.gather == "peers" and config.tensor_parallel == 1,
        "gather=peers is for several devices: set tensor_parallel above 1",
    ),
    (
        lambda config: config.check_replicas and config.tensor_parallel == 1,
        "check_replicas compares devices: set tensor_parallel above 1",
    ),
)


def check_options(config) -> None:
    """Raises `ConfigError` for the first rule that an `EngineConfig` breaks."""
    check_choice("adaptive", config.adaptive, ADAPTIVE)
    for is_broken, message in _RULES:
        if is_broken(config):
            raise ConfigError(message)
