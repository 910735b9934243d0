"""What the engine and its servers say to each other, in one process or over a socket.
No jax here.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self

from peagle_jax.config import FIRST_VERSION, DrafterConfig, EngineConfig, Running, TargetConfig
from peagle_jax.engine.host.pages import Salt
from peagle_jax.engine.host.request import PromptLogprob, Request, Round, TokenLogprob
from peagle_jax.engine.host.rules import check_request_of_model
from peagle_jax.engine.host.stats import Acceptance, DeviceMemory
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import Tokenizer

MatcherOf = Hashable
"""A constraint compiled for one sequence: a `Matcher` where the engine is, elsewhere what stands
for one.
"""


class Checked(NamedTuple):
    """A constraint that has been checked.

    Attributes:
      definition: as llguidance reads it.
      memory: bytes that it takes when it is compiled.
      origin: whose constraint it is, to tell clients apart.
    """

    definition: str
    memory: int
    origin: str


@dataclass(frozen=True)
class Job:
    """One sequence to generate. The submitter chooses `key`; it is unique among the jobs that run.

    Jobs with different `salt` share no cached prefix.
    """

    key: Hashable
    prompt: list[int]
    params: SamplingParams
    salt: Salt = ()
    priority: int = 0
    matcher: MatcherOf | None = None
    """The constraint of `params`, for this sequence alone."""


class Ended(NamedTuple):
    """How a sequence ended, with the fields that `Acceptance.of` reads; times are of
    `time.monotonic`.
    """

    finish_reason: str
    stop_reason: int | str | None
    error: str | None
    error_is_the_clients: bool
    num_tokens: int
    """Output tokens."""
    num_draft: int
    rounds: int
    emitted: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    start_time: float | None
    first_token_time: float | None
    finish_time: float | None
    versions: list[tuple[int, str]]
    """Of the weights that wrote the output, each with its first token's index."""

    @classmethod
    def of(cls, request: Request) -> Self:
        """The record of a request that has ended."""
        given = {name: getattr(request, name) for name in cls._fields if name != "num_tokens"}
        return cls(num_tokens=len(request.output), **given)


class Tokens(NamedTuple):
    """Output of one round for a sequence. The last event of a sequence has `request`."""

    key: Hashable
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    request: Ended | None = None
    round: Round | None = None
    """Drafts of the round; None if prefill sampled the token, or without tokens."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """With the first tokens of a sequence, if its request has `prompt_logprobs`."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """An order to replace weights, as `Engine.update_weights` does.

    Args:
      folder, head: folders of the target's weights and the head's; None: they stay.
    """

    folder: str | None
    head: str | None
    version: str | None
    running: Running


Control = WeightUpdate | Literal["pause", "resume"]
"""What a caller with the admin scope may order."""


@dataclass(frozen=True)
class Refused:
    """Jobs that were submitted together and are refused: `ConfigError` or `QueueFull`."""

    keys: tuple[Hashable, ...]
    error: Exception


Event = Tokens | Refused


@dataclass(frozen=True)
class Load:
    """State of the engine after a round."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of the waiting requests; the prefix cache may have some of them."""
    pages_used: int = 0
    pages_total: int = 0
    pages_idle: int = 0
    """Pages of the prefix cache that no request holds; they count as free."""
    prefix_queried: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_found: int = 0
    """Prompt tokens found there."""
    rings_restored: int = 0
    """How often a prompt went on from saved rings, see `EngineConfig.saved_rings`."""
    num_preemptions: int = 0
    num_not_finite: int = 0
    """Requests that ended because their logits were not finite."""
    rounds: int = 0
    """Calls of `Engine.step` so far."""
    sequence_seconds: float = 0.0
    """Seconds of these rounds, each times its running sequences."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Counts of all rounds so far that had drafts."""
    num_draft: Mapping[int, int] = field(default_factory=dict)
    """K, drafts per round, by batch size."""
    num_draft_changes: int = 0
    """How often the K of a batch size was replaced at run time."""
    predicted_rate: float = 0.0
    """Tokens per second that the last choice of K predicts; 0 before the first."""
    num_tokens: int = 0
    """Tokens generated for requests so far, over all servers of the engine."""
    version: str = FIRST_VERSION
    """Of the weights."""
    is_paused: bool = False
    """Whether requests wait for an order to resume."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


@dataclass(frozen=True)
class Death:
    """Why the engine serves no longer: the kind of its exception, or of its end, and all that is
    known.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The death by an exception."""
        return cls(type(error).__name__, repr(error))


@dataclass(frozen=True)
class Description:
    """What a server reads of an engine. It can be pickled.

    Attributes:
      tokenizer: None if the model is served without one.
    """

    config: EngineConfig
    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    tokenizer: Tokenizer | None

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Checks a request as the engine does.

        Raises:
          ConfigError: the request can never run; `field` is "prompt" or a field of
            `SamplingParams`.
        """
        check_request_of_model(prompt, params, self.config, self.target_config, self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class Listener:
    """What a server does when its engine calls it: in its event loop.

    Args:
      deliver: called after each round with its events, in order, and the tokens that it gave to all
        requests.
      on_ready: called when requests can be served; smaller batches may still compile.
      on_death: called with the reason; no events follow.
    """

    deliver: Callable[[Sequence[Event], int], None]
    on_ready: Callable[[], None]
    on_death: Callable[[Death], None]


class Worker(Protocol):
    """The engine as a server uses it: `EngineWorker` in the same process, `RemoteEngine` in another
    one.
    """

    description: Description
    load: Load
    """State after the last round. It is replaced as a whole, so any thread may read it."""
    busy_seconds: float
    """Time of the round in progress, in which its process has run; 0 between rounds."""
    batch_sizes_pending: int
    """Batch sizes with a program that is not compiled yet."""
    device_memory: Mapping[int, DeviceMemory]
    """Of each device that reports it, by rank."""

    def start(self, listener: Listener) -> None:
        """Begins to serve; `Listener` says what follows. Call it in the event loop."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues the jobs of a request, all or none; the results arrive as events."""

    def abort(self, key: Hashable) -> None:
        """Ends a job. Unless it has ended already, its last event has the finish reason "abort"."""

    def flush_prefix_cache(self, salt: Salt, on_done: Callable[[int], None]) -> None:
        """Forgets idle pages as `Engine.flush_prefix_cache` does, between two rounds.

        Args:
          on_done: called in the event loop with the number of pages; not after `stop` or a death.
        """

    def control(self, order: Control, on_done: Callable[[str | Exception], None]) -> None:
        """Carries out an order between two rounds. Rounds go on while weights are read.

        Args:
          on_done: called in the event loop with the version of the weights then, or with what went
            wrong: `ConfigError` or `NotReady`, and another error of an engine that goes on; not
            after `stop` or a death.
        """

    def prepare_matchers(self) -> None:
        """Reads the vocabulary for constraints; blocks. Raises `ConfigError` if it cannot be used
        for them.
        """

    def matchers(self, constraint: Checked, number: int) -> list[MatcherOf]:
        """Compiles a constraint for so many sequences; blocks.

        Raises:
          ConfigError: the model cannot be constrained, or not so.
          ConstraintsFull: the constraints of open requests leave no memory for it.
        """

    def stop(self, timeout: float) -> bool:
        """Ends the engine after its round; whether it ended within `timeout` seconds."""
