"""Request validation: one list of rules, used by the engine, the servers and the command lines."""

import itertools
from collections.abc import Collection, Iterator, Sequence

from peagle_jax.config import ConfigError, EngineConfig, TargetConfig
from peagle_jax.sampling_params import MAX_BIAS, MAX_END_IDS, SamplingParams
from peagle_jax.text.tokenizer import Tokenizer


def banned_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Token ids of bad words, each as it is and after a space.

    Raises:
      ConfigError: there is no tokenizer, or one whose patterns may search for any time; a word is
        not one token. `field` is "bad_words".
    """
    token_ids = set()
    for word in words:
        if tokenizer is None:
            raise ConfigError.of("bad_words", "need a model with a tokenizer; use logit_bias")
        # An event loop and the rounds of an engine wait for this.
        if tokenizer.may_take_forever:
            rule = "need a tokenizer with the patterns of a supported family; use logit_bias"
            raise ConfigError.of("bad_words", rule)
        try:
            plain, spaced = (
                tokenizer.encode(space + word.lstrip(), special=False) for space in ("", " ")
            )
        except ConfigError as error:
            raise ConfigError.of("bad_words", str(error)) from error
        if len(plain) > 1:
            rule = f"{word!r} is {len(plain)} tokens; words of one token are supported"
            raise ConfigError.of("bad_words", rule)
        token_ids.update(*(ids for ids in (plain, spaced) if len(ids) == 1))
    return tuple(token_ids)


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    *,
    vocab_size: int,
    has_tokenizer: bool,
    eos_ids: Collection[int] = (),
    banned_ids: Collection[int] = (),
) -> None:
    """Checks a request against the sizes of an engine.

    Args:
      prompt: token ids.
      config: the engine's.
      vocab_size: the target's.
      has_tokenizer: whether the engine can match stop strings.
      eos_ids: the target's end-of-sequence ids.
      banned_ids: token ids of the bad words.
    Raises:
      ConfigError: the request can never run; `field` is "prompt" or a field of `SamplingParams`.
    """
    rules = (
        _rules(prompt, params, config, vocab_size, has_tokenizer),
        _control_rules(params, vocab_size, eos_ids, banned_ids),
    )
    for field, broken, rule in itertools.chain(*rules):
        if broken:
            raise ConfigError.of(field, rule)


def check_request_of_model(
    prompt: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    target: TargetConfig,
    tokenizer: Tokenizer | None,
) -> None:
    """`check_request` with the limits of a target and its tokenizer; raises as it does."""
    check_request(
        prompt,
        params,
        config,
        vocab_size=target.vocab_size,
        has_tokenizer=tokenizer is not None,
        eos_ids=target.eos_ids,
        banned_ids=banned_ids(params.bad_words, tokenizer),
    )


def _rules(
    prompt: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    vocab_size: int,
    has_tokenizer: bool,
) -> Iterator[tuple[str, bool, str]]:
    """Yields (field, is broken, rule). Lazy: the length check comes before the scan of all token
    ids."""
    size, limit = len(prompt), config.max_model_len
    yield "prompt", size == 0, "is empty; it needs at least one token"
    yield (
        "prompt",
        size >= limit,
        f"{size} tokens leave no room for output: prompt and output may have {limit} "
        "(max_model_len)",
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
    wanted = params.prompt_logprobs
    yield (
        "prompt_logprobs",
        wanted is not None and not config.prompt_logprobs,
        "the engine was started without prompt_logprobs (--prompt-logprobs)",
    )
    yield (
        "prompt_logprobs",
        (wanted or 0) > most,
        f"{wanted} is more than the {most} that the engine was compiled for (max_logprobs)",
    )
    yield (
        "stop",
        bool(params.stop) and not has_tokenizer,
        "strings need a model with a tokenizer; use ids of tokens",
    )
    yield (
        "structured",
        params.structured is not None and not has_tokenizer,
        "needs a model with a tokenizer",
    )
    for field in ("allowed_token_ids", "bad_words", "min_tokens"):
        yield (
            field,
            params.structured is not None and bool(getattr(params, field)),
            "may forbid the only tokens that a structured output allows; leave one of the two out",
        )


def _control_rules(
    params: SamplingParams, vocab_size: int, eos_ids: Collection[int], banned_ids: Collection[int]
) -> Iterator[tuple[str, bool, str]]:
    """Rules of the fields that change logits, as `_rules`."""
    known = range(vocab_size)
    outside = f"token ids must lie between 0 and {vocab_size - 1}"
    allowed = known if params.allowed_token_ids is None else params.allowed_token_ids
    biased = [token for token, _ in params.logit_bias]
    yield "logit_bias", any(token not in known for token in biased), outside
    yield "stop_ids", any(token not in known for token in params.stop_ids), outside
    listed = params.allowed_token_ids or ()
    yield "allowed_token_ids", any(token not in known for token in listed), outside
    num_biased = len(params.biases(banned_ids))
    yield (
        "bad_words",
        num_biased > MAX_BIAS,
        f"with logit_bias or allowed_token_ids they concern {num_biased} tokens; "
        f"at most {MAX_BIAS} may be",
    )
    banned = set(banned_ids)
    yield "bad_words", banned.issuperset(allowed), "forbid every token that is allowed"
    ends = params.end_ids(eos_ids)
    yield (
        "min_tokens",
        params.min_tokens > 0 and len(ends) > MAX_END_IDS,
        f"works with at most {MAX_END_IDS} tokens that end the text, and there are {len(ends)}",
    )
    yield (
        "min_tokens",
        params.min_tokens > 0 and (banned | ends).issuperset(allowed),
        "every token that is allowed ends the text",
    )
