"""Sampling parameters of one request."""

from dataclasses import dataclass

from peagle_jax.errors import ConfigError


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
      stop: strings that end the text; the text excludes them.
      stop_ids: token ids that end the text, in addition to the model's end-of-sequence ids.
      ignore_eos: do not stop at the model's end-of-sequence ids.
      logprobs: number of most likely alternatives to return per token (0: only the token); None: none.
      num_speculative_tokens: drafts per round for this request, at most the engine's; 0: plain decoding.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
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
                self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
                "num_speculative_tokens",
                "None or not negative",
            ),
        )
        for ok, name, rule in checks:
            if not ok:
                rule = f"{getattr(self, name)!r} must be {rule}"
                raise ConfigError(f"{name}={rule}", field=name, rule=rule)
