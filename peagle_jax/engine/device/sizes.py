"""Checks engine sizes against the model's limits, before weights are loaded or programs
compiled."""

from peagle_jax.config import ConfigError, EngineConfig, TargetConfig

_LONGEST_CHUNK = 4096  # a prefill chunk up to this many tokens is always accepted


def check_sizes(target: TargetConfig, config: EngineConfig) -> None:
    """Checks an engine's sizes against its model; `memory.fit_pages` checks them against memory.

    A `max_model_len` above the model's positions but not above the default is no error: the engine
    lowers it, so that the default works for small models.

    Raises:
      ConfigError: a size exceeds the model's limit; the message gives the largest allowed value.
    """
    longest = max(target.max_position, EngineConfig.max_model_len)
    chunk = max(_LONGEST_CHUNK, min(config.max_model_len, target.max_position))
    positions = "positions of the model"
    if target.has_dynamic_rope:
        positions += ", beyond which rope_type dynamic turns keys that are cached by other angles"
    rules = (
        ("max_model_len", longest, target.max_position, positions),
        ("prefill_chunk", chunk, chunk, "tokens that a prefill call is good for"),
        ("max_logprobs", target.vocab_size, target.vocab_size, "tokens of the vocabulary"),
    )
    for name, accepted, most, what in rules:
        if getattr(config, name) > accepted:
            raise ConfigError(
                f"{name}={getattr(config, name)} is above the {most} {what}; "
                f"at most {most} is possible"
            )
