"""Sampling parameters of one request."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle_jax.errors import ConfigError
from peagle_jax.options import Rule, at_least, check_all, option, within
from peagle_jax.structured import Structured

MAX_BIAS = 1024
"""Most tokens with a bias of their own: `logit_bias`, or `allowed_token_ids`, each with the bad
words."""
MAX_END_IDS = 288
"""Most tokens that end the text of a request with `min_tokens`."""

_MAX_BAD_WORDS = 128
_NOT_NEGATIVE = Rule("None or not negative", lambda value: value >= 0)
# The least is 0.01 in float32, as clients of gRPC send it: less could divide a logit beyond
# float32.
_PENALTY = Rule("between 0.01 and 100", lambda value: 0.009999999776482582 <= value <= 100)


def _as_tuple(value: Any) -> Any:
    """A list as a tuple; what is none stays as it is, for `check_all` to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. `structured` is what the text must match.
    docs/serving.md ("Sampling controls") has the definitions and their order."""

    max_tokens: int = option(256, "most tokens to generate", at_least(1), metavar="N")
    temperature: float = option(
        0.0, "0 is greedy, else the temperature of the softmax", within(0, 100), metavar="T"
    )
    top_k: int = option(
        0,
        "keep the N most likely tokens; 0 keeps all",
        Rule("0 (off) or positive, below 2**31", lambda value: 0 <= value < 2**31),
        metavar="N",
    )
    top_p: float = option(
        1.0,
        "keep the smallest set of tokens whose probability reaches P",
        Rule("in (0, 1]", lambda value: 0 < value <= 1),
        metavar="P",
    )
    min_p: float = option(
        0.0,
        "drop tokens less likely than P times the most likely one",
        Rule("in [0, 1]", lambda value: 0 <= value <= 1),
        metavar="P",
    )
    seed: int | None = option(
        None,
        "seed of the sampling: equal ones give equal texts if each round has the same number of "
        "drafts; else the request's number",
        Rule("between 0 and 2**63 - 1", lambda value: 0 <= value < 2**63),
        metavar="N",
    )
    stop: tuple[str, ...] = option(
        (),
        "end the text before TEXT; repeatable",
        Rule("without empty strings", all),
        metavar="TEXT",
    )
    include_stop_str_in_output: bool = option(
        False, "the text includes the stop string that ended it"
    )
    # Otherwise the text and stop strings have their spelling; the end-of-sequence id that ended the
    # text is left out in either case, unless stop strings are included.
    skip_special_tokens: bool = option(True, "the text leaves special tokens out")
    stop_ids: tuple[int, ...] = option(
        (), "end the text at the token of this id too; repeatable", flag="stop-id", metavar="ID"
    )
    ignore_eos: bool = option(False, "go on after the model's end-of-text tokens")
    logprobs: int | None = option(
        None,
        "log-probability of each token and of the N likeliest",
        _NOT_NEGATIVE,
        metavar="N",
    )
    logprobs_mode: Literal["raw", "sampled"] = option(
        "raw",
        "law of logprobs: raw is the model's; sampled is after controls, constraint, temperature, "
        "top-k, top-p and min-p",
    )
    prompt_logprobs: int | None = option(
        None,
        "the same of each token of the prompt, which the engine must be made for (prompt-logprobs)",
        _NOT_NEGATIVE,
        metavar="N",
    )
    num_speculative_tokens: int | None = option(
        None,
        "drafts per round, at most the engine's, which is the default; 0 decodes plainly",
        _NOT_NEGATIVE,
        short="-K",
        metavar="K",
    )
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = option(
        (),
        "add BIAS to the logit of token ID; repeatable",
        Rule(f"of at most {MAX_BIAS} tokens", lambda pairs: len(pairs) <= MAX_BIAS),
        Rule("between -100 and 100", lambda pairs: all(-100 <= bias <= 100 for _, bias in pairs)),
        metavar="ID=BIAS",
    )
    allowed_token_ids: tuple[int, ...] | None = option(
        None,
        "generate only tokens of these ids; repeatable",
        Rule(f"None, or 1 to {MAX_BIAS} tokens", lambda ids: 1 <= len(ids) <= MAX_BIAS),
        flag="allowed-token",
        metavar="ID",
    )
    bad_words: tuple[str, ...] = option(
        (),
        "never generate WORD, which must be one token; repeatable",
        Rule(f"at most {_MAX_BAD_WORDS} words", lambda words: len(words) <= _MAX_BAD_WORDS),
        Rule("without empty words", lambda words: all(word.strip() for word in words)),
        flag="bad-word",
        metavar="WORD",
    )
    min_tokens: int = option(
        0,
        "nothing ends the text before N tokens: end and stop ids are not generated, stop strings "
        "not looked for",
        Rule("not negative", lambda value: value >= 0),
        metavar="N",
    )
    repetition_penalty: float = option(
        1.0,
        "divide positive logits of tokens in prompt and output by R, multiply negative ones",
        _PENALTY,
        metavar="R",
    )
    frequency_penalty: float = option(
        0.0,
        "subtract F from a token's logit for each time it was generated",
        within(-2, 2),
        metavar="F",
    )
    presence_penalty: float = option(
        0.0, "subtract F from the logits of tokens that were generated", within(-2, 2), metavar="F"
    )
    structured: Structured | None = None

    def __post_init__(self):
        allowed, biases = self.allowed_token_ids, self.logit_bias
        changed = dict(
            stop=_as_tuple(self.stop),
            stop_ids=_as_tuple(self.stop_ids),
            logit_bias=_as_tuple(biases.items() if isinstance(biases, Mapping) else biases),
            allowed_token_ids=allowed if allowed is None else _as_tuple(allowed),
            bad_words=_as_tuple(self.bad_words),
        )
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        check_all(self)
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))
        if allowed is not None:
            unique = tuple(dict.fromkeys(self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", unique)
        if not isinstance(self.structured, Structured | None):
            raise ConfigError.of("structured", "must be Structured, as Structured.json_object()")
        if self.min_tokens > self.max_tokens:
            rule = f"{self.min_tokens} must be at most max_tokens, which is {self.max_tokens}"
            raise ConfigError(f"min_tokens={rule}", field="min_tokens", rule=rule)

    @property
    def is_adjusted(self) -> bool:
        """Whether a field changes the target's logits."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        lists = self.logit_bias or self.allowed_token_ids or self.bad_words
        return bool(lists or self.min_tokens) or penalties != (1.0, 0.0, 0.0)

    def biases(self, banned: Collection[int] = ()) -> dict[int, float]:
        """Bias of the tokens that have one, or of all allowed tokens; -inf for the ids of bad
        words."""
        biased = dict(self.logit_bias)
        if self.allowed_token_ids is not None:
            biased = {token: biased.get(token, 0.0) for token in self.allowed_token_ids}
        return biased | dict.fromkeys(banned, -math.inf)

    def end_ids(self, eos_ids: Collection[int]) -> set[int]:
        """Tokens that end the text, given the model's end-of-sequence ids."""
        return {*self.stop_ids, *(() if self.ignore_eos else eos_ids)}
