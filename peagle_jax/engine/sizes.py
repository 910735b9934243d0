"""Sizes that a model cannot have, found before weights are loaded, memory is taken or programs compiled."""

from peagle_jax.config import ConfigError, EngineConfig, TargetConfig

_LONGEST_CHUNK = 4096  # prompt tokens of one call that are never too many


def check_sizes(target: TargetConfig, config: EngineConfig) -> None:
    """Checks an engine's sizes against its model; `memory.fit_pages` checks them against the memory.

    A `max_model_len` up to the default is cut to the model's positions without an error, so that the default
    serves small models too.

    Raises:
      ConfigError: a size is above what the model has; the message gives the largest value.
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
                f"{name}={getattr(config, name)} is above the {most} {what}; at most {most} is possible"
            )
