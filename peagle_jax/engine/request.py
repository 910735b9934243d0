"""One request from arrival to its last token.

The scheduler moves a `Request` between states and gives it a slot and pages; `append` decides when the
text ends.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from peagle_jax.config import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

NOT_FINITE = (
    "the model's logits are not finite numbers (NaN or infinity): its weights or their scales are damaged, "
    "or a number overflows the compute dtype"
)


class RequestState(enum.Enum):
    """WAITING -> PREFILL -> RUNNING -> FINISHED; preemption leads back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"  # holds a slot and pages; chunks of its tokens remain to be sent
    RUNNING = "running"  # its last chunk was dispatched; the device decodes it
    FINISHED = "finished"


class TokenLogprob(NamedTuple):
    """Log-probability of one output token, and the most likely (id, logprob) pairs beside it."""

    logprob: float
    top: list[tuple[int, float]]


class BatchLogprobs(NamedTuple):
    """Log-probabilities beside the tokens [B, C] of one call, n alternatives each."""

    chosen: np.ndarray  # [B, C]
    top_ids: np.ndarray  # [B, C, n]
    top_logprobs: np.ndarray  # [B, C, n]

    def row(self, row: int, count: int, num_top: int) -> list[TokenLogprob]:
        """The first `count` tokens of a row, with the first `num_top` alternatives each."""
        ids = self.top_ids[row, :count, :num_top].tolist()
        logprobs = self.top_logprobs[row, :count, :num_top].tolist()
        chosen = self.chosen[row, :count].tolist()
        return [
            TokenLogprob(chosen[token], list(zip(ids[token], logprobs[token], strict=True)))
            for token in range(count)
        ]


@dataclass(kw_only=True, eq=False)
class Request:
    """A request and its life. Compared by identity: a slot number never identifies a request.

    Args:
      id: the caller's name for it.
      prompt: token ids, at least one.
      params: sampling parameters.
      num_draft: drafts per round for this request, at most the engine's J.
      seed: 63-bit seed of its random key.
      stop_checker: called with the output so far after each token; returns the stop string that the
        text ends in, or None.
    """

    id: str | int
    prompt: list[int]
    params: SamplingParams
    num_draft: int
    seed: int
    stop_checker: Callable[[list[int]], str | None] | None = None

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    """One entry per output token when `params.logprobs` asks for them."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or the stop string that ended the text with `finish_reason` "stop"."""
    error: str | None = None
    """A sentence that says what failed, with `finish_reason` "error"."""

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    """How many of `tokens` were sent in prefill calls since the last admission."""
    in_flight: int = 0
    """Dispatched calls whose tokens the host has not seen: decode rounds, and a final prefill chunk."""
    prefill_in_flight: bool = False
    """One of the calls in flight is the final prefill chunk (it yields exactly one token)."""

    rounds: int = 0
    drafted: int = 0
    """Drafts that the target checked: `num_draft` in every round."""
    accepted: int = 0
    """Drafts that became output."""
    accepted_per_position: list[int] = field(default_factory=list)
    preemptions: int = 0

    arrival_time: float | None = None
    start_time: float | None = None
    """When its first prefill call was planned; until then it waited."""
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self):
        self.accepted_per_position = [0] * self.num_draft
        if self.params.logprobs is not None:
            self.logprobs = []

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def num_to_prefill(self) -> int:
        """How many of `tokens` prefill sends: the prompt, after a preemption all but the newest token.

        That one is given beside the last chunk, so the request goes on with a round as if it had never
        left: no token is sampled a second way, and rounds emit all tokens but the first.
        """
        return self.num_tokens - bool(self.output)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def committed(self) -> int:
        """Positions whose KV is final as far as the host knows.

        Running, that is all but the last token, which has none yet: a prompt of 5 commits 5 when its
        last chunk is dispatched, and still 5 when the sampled sixth token arrives.
        """
        if self.state is not RequestState.RUNNING:
            return self.num_prefilled
        return self.num_tokens - (0 if self.prefill_in_flight else 1)

    @property
    def rounds_in_flight(self) -> int:
        """Decode rounds among the calls in flight; each commits between 1 and J+1 positions."""
        return self.in_flight - self.prefill_in_flight

    @property
    def emitted(self) -> int:
        """Output tokens that rounds emitted: all but the first, which prefill samples."""
        return max(0, len(self.output) - 1)

    def record_round(self, num_accepted: int) -> None:
        """Counts one decode round in which `num_accepted` of this request's drafts became output."""
        self.rounds += 1
        self.drafted += self.num_draft
        self.accepted += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def append(
        self,
        tokens: Sequence[int],
        *,
        eos_ids: Collection[int],
        max_model_len: int,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> list[int]:
        """Appends tokens until one ends the text; the ending token is kept, later ones are dropped.

        With stop id 9 and `tokens` [4, 9, 7] the output grows by [4, 9] and the request is FINISHED.

        Args:
          tokens: what one call produced, in order.
          eos_ids: the model's end-of-sequence ids.
          max_model_len: most tokens of prompt and output together.
          logprobs: one entry per token, stored when the request asked for them.

        Returns:
          The tokens that were kept.
        """
        assert not self.is_finished, f"request {self.id} is finished and was given tokens"
        kept = []
        for index, token in enumerate(tokens):
            self.output.append(token)
            kept.append(token)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs.append(logprobs[index])
            self._finish_if_ended(token, eos_ids, max_model_len)
            if self.is_finished:
                break
        return kept

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Enters the terminal state; slot and pages are the scheduler's to take back."""
        assert not self.is_finished, f"request {self.id} finished twice"
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def fail(self, error: str) -> None:
        """Enters the terminal state because of a fault; `error` is a sentence for people."""
        self.finish("error")
        self.error = error

    def _finish_if_ended(self, token: int, eos_ids: Collection[int], max_model_len: int) -> None:
        # A stop wins over a length that is reached by the same token: the text did end by itself.
        is_eos = token in eos_ids and not self.params.ignore_eos
        if is_eos or token in self.params.stop_ids:
            self.finish("stop", token)
            return
        stop_string = self.stop_checker(self.output) if self.stop_checker is not None else None
        if stop_string is not None:
            self.finish("stop", stop_string)
        elif len(self.output) >= self.params.max_tokens or self.num_tokens >= max_model_len:
            self.finish("length")
