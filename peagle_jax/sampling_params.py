"""Sampling parameters of one request."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from peagle_jax.errors import ConfigError
from peagle_jax.structured import Structured

MAX_BIAS = 1024
"""Most tokens with a bias of their own: `logit_bias`, or `allowed_token_ids`, each with the bad words."""
MAX_END_IDS = 288
"""Most tokens that end the text of a request with `min_tokens`."""

_MAX_BAD_WORDS = 128
_LEAST_PENALTY = 0.009999999776482582
"""0.01 in float32, as clients of gRPC send it."""
_SHOWN = 80
"""Most characters of a value in an error."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
      max_tokens: maximum number of tokens to generate.
      temperature: 0 for greedy, otherwise the softmax temperature.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p.
      min_p: drop tokens less likely than min_p times the most likely one.
      seed: random seed; equal seeds give equal outputs if each round has the same number of drafts.
        None: the request's number.
      stop: strings that end the text.
      include_stop_str_in_output: the text includes the stop string that ended it.
      skip_special_tokens: the text leaves special tokens out. Otherwise it and stop strings have their spelling;
        the end-of-sequence id that ended the text is left out in either case, unless stop strings are included.
      stop_ids: token ids that end the text, in addition to the model's end-of-sequence ids.
      ignore_eos: do not stop at the model's end-of-sequence ids.
      logprobs: number of most likely alternatives to return per token (0: only the token); None: none.
      prompt_logprobs: number of most likely alternatives to return per token of the prompt; None: none. The
        engine needs `EngineConfig.prompt_logprobs`.
      num_speculative_tokens: drafts per round for this request, at most the engine's; 0: plain decoding.
      logit_bias: numbers to add to the logits of some tokens; pairs or a mapping of token id to bias.
      allowed_token_ids: the only tokens that may be generated; None: all.
      bad_words: words of one token each that are never generated.
      min_tokens: tokens before which nothing ends the text: neither end-of-sequence nor stop ids may be
        generated, and stop strings are not looked for.
      repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies negative ones.
      frequency_penalty: subtracted from a token's logit for each time that it was generated.
      presence_penalty: subtracted from the logit of each generated token.
      structured: what the text must match. `logprobs` stay those of the unconstrained model.

    docs/serving.md ("Sampling controls") has the definitions and their order.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    structured: Structured | None = None

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(pairs).items())))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids))
            )
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "bad_words", words)
        checks = (
            (self.max_tokens >= 1, "max_tokens", "at least 1"),
            (0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100"),
            (0 <= self.top_k < 2**31, "top_k", "0 (off) or positive, below 2**31"),
            (0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]"),
            (0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]"),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1"),
            (all(self.stop), "stop", "without empty strings"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "None or not negative"),
            (
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "prompt_logprobs",
                "None or not negative",
            ),
            (
                self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
                "num_speculative_tokens",
                "None or not negative",
            ),
            *self._control_checks(),
        )
        for ok, name, rule in checks:
            if not ok:
                value = repr(getattr(self, name))
                value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
                rule = f"{value} must be {rule}"
                raise ConfigError(f"{name}={rule}", field=name, rule=rule)

    def _control_checks(self) -> tuple[tuple[bool, str, str], ...]:
        """(is valid, field, rule) for the fields that change logits."""
        biases = [bias for _, bias in self.logit_bias]
        allowed = self.allowed_token_ids
        return (
            (len(biases) <= MAX_BIAS, "logit_bias", f"of at most {MAX_BIAS} tokens"),
            (all(-100.0 <= bias <= 100.0 for bias in biases), "logit_bias", "between -100 and 100"),
            (
                allowed is None or 1 <= len(allowed) <= MAX_BIAS,
                "allowed_token_ids",
                f"None, or 1 to {MAX_BIAS} tokens",
            ),
            (len(self.bad_words) <= _MAX_BAD_WORDS, "bad_words", f"at most {_MAX_BAD_WORDS} words"),
            (all(word.strip() for word in self.bad_words), "bad_words", "without empty words"),
            (self.min_tokens >= 0, "min_tokens", "not negative"),
            (
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"at most max_tokens, which is {self.max_tokens}",
            ),
            # Less than this could divide a logit beyond float32.
            (
                _LEAST_PENALTY <= self.repetition_penalty <= 100.0,
                "repetition_penalty",
                "between 0.01 and 100",
            ),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2"),
        )

    @property
    def is_adjusted(self) -> bool:
        """Whether a field changes the target's logits."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        lists = self.logit_bias or self.allowed_token_ids or self.bad_words
        return bool(lists or self.min_tokens) or penalties != (1.0, 0.0, 0.0)

    def biases(self, banned: Collection[int] = ()) -> dict[int, float]:
        """Bias of the tokens that have one, or of all allowed tokens; -inf for the ids of bad words."""
        biased = dict(self.logit_bias)
        if self.allowed_token_ids is not None:
            biased = {token: biased.get(token, 0.0) for token in self.allowed_token_ids}
        return biased | dict.fromkeys(banned, -math.inf)

    def end_ids(self, eos_ids: Collection[int]) -> set[int]:
        """Tokens that end the text, given the model's end-of-sequence ids."""
        return {*self.stop_ids, *(() if self.ignore_eos else eos_ids)}
