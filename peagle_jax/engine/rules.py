"""Request validation: one list of rules, used by the engine, the servers and the command lines."""

from collections.abc import Iterator, Sequence

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.sampling_params import SamplingParams


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    *,
    vocab_size: int,
    has_tokenizer: bool,
) -> None:
    """Checks a request against the sizes of an engine.

    Args:
      prompt: token ids.
      config: the engine's.
      vocab_size: the target's.
      has_tokenizer: whether the engine can match stop strings.
    Raises:
      ConfigError: the request can never run; `field` is "prompt" or a field of `SamplingParams`.
    """
    for field, broken, rule in _rules(prompt, params, config, vocab_size, has_tokenizer):
        if broken:
            raise ConfigError.of(field, rule)


def _rules(
    prompt: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    vocab_size: int,
    has_tokenizer: bool,
) -> Iterator[tuple[str, bool, str]]:
    """Yields (field, is broken, rule). Lazy: the length check comes before the scan of all token ids."""
    size, limit = len(prompt), config.max_model_len
    yield "prompt", size == 0, "is empty; it needs at least one token"
    yield (
        "prompt",
        size >= limit,
        f"{size} tokens leave no room for output: prompt and output may have {limit} (max_model_len)",
    )
    yield (
        "prompt",
        any(not 0 <= token < vocab_size for token in prompt),
        f"token ids must lie between 0 and {vocab_size - 1}",
    )
    drafts, most = params.num_speculative_tokens or 0, config.num_draft
    yield (
        "num_speculative_tokens",
        drafts > most,
        f"{drafts} is more than the {most} that the engine was compiled for",
    )
    logprobs, most = params.logprobs or 0, config.max_logprobs
    yield (
        "logprobs",
        logprobs > most,
        f"{logprobs} is more than the {most} that the engine was compiled for (max_logprobs)",
    )
    yield (
        "stop",
        bool(params.stop) and not has_tokenizer,
        "strings need a model with a tokenizer; use ids of tokens",
    )
