"""The kinds of compiled programs: what each is lowered for, and how a call of it runs.

A program is a value: equal ones are one program, also in another process and on disk. Its shapes,
the engine's configuration and weights (`Functions`) decide everything else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax

from peagle_jax.config import EngineConfig
from peagle_jax.engine.device import ring_copies
from peagle_jax.engine.device.functions import Functions
from peagle_jax.engine.device.output_shapes import prefill_output, round_output, spec_of
from peagle_jax.engine.device.read_only import ReadOnly, join, read_only, without
from peagle_jax.engine.device.transfer import Resident, pack
from peagle_jax.engine.host.calls import DecodeCall, RoundShape, idle_prefill
from peagle_jax.engine.host.controls import idle_controls
from peagle_jax.engine.host.prefill_shapes import PrefillShape
from peagle_jax.method import step
from peagle_jax.method.plan import (
    ControlsPlan,
    DecodePlan,
    PrefillPlan,
    greedy_only,
    mask_words,
)
from peagle_jax.method.step import StepOutput


def _specs(*operands) -> tuple:
    return jax.tree.map(spec_of, operands)


class Program(ABC):
    """One program. `str` is its name for people, `repr` the name of its file."""

    @abstractmethod
    def lower(self, functions: Functions, state: step.State) -> Callable:
        """The function that lowers it for its operands."""

    @abstractmethod
    def operands(self, functions: Functions, state: step.State) -> tuple:
        """Shapes of what it takes, beside the weights. `state` may be one of shapes."""

    @abstractmethod
    def results(self, operands: tuple):
        """Shapes of what it returns, given those of its operands."""


class Call(Program):
    """A program that runs requests: its plan, mask and output have buffers of their own."""

    @abstractmethod
    def idle_plan(self, config: EngineConfig) -> PrefillPlan | DecodePlan:
        """The plan of a call without a request."""

    @abstractmethod
    def mask_rows(self) -> tuple[int, int] | None:
        """Rows of the mask and of each of its requests; None: it takes no mask."""

    @abstractmethod
    def output(self, config: EngineConfig) -> StepOutput:
        """Shapes of its output."""

    @abstractmethod
    def parts(self, state: step.State) -> tuple:
        """What it writes of the state, then what it only reads."""

    @abstractmethod
    def joined(self, state: step.State, written: step.State) -> step.State:
        """The state after a call, given that before it."""

    def resident(self, functions: Functions, state: step.State) -> Resident:
        """The buffers of its calls."""
        return Resident(*self._buffers(functions, state))

    def operands(self, functions: Functions, state: step.State) -> tuple:
        written, *kept = self.parts(state)
        return _specs(written, *Resident.shapes(*self._buffers(functions, state)), *kept)

    def _buffers(self, functions: Functions, state: step.State) -> tuple:
        """Arguments of `Resident`."""
        mask = self.mask_rows()
        if mask is not None:
            mask = (*mask, mask_words(state.controls.counts.shape[1]))
        output = functions.devices.reported(self.output(functions.config))
        return self.idle_plan(functions.config), mask, output, functions.devices.copied

    def results(self, operands: tuple):
        return operands[0], operands[3]

    def run(
        self, program: Callable, weights: list, state: step.State, resident: Resident
    ) -> step.State:
        """Dispatches one call over the plan and mask in `resident`; `state` is consumed."""
        written, *kept = self.parts(state)
        buffers = resident.plan, resident.mask, resident.bits
        written, resident.bits = program(weights, written, *buffers, *kept)
        return self.joined(state, written)


@dataclass(frozen=True)
class Prefill(Call):
    """`scores`: with log-probabilities of prompts."""

    shape: PrefillShape
    scores: bool = False

    def __str__(self) -> str:
        name = f"the program of prefills of {self.shape.rows} x {self.shape.chunk} tokens"
        return f"{name} with scores" if self.scores else name

    def lower(self, functions: Functions, state: step.State) -> Callable:
        return partial(functions.prefill.lower, scores=self.scores)

    def idle_plan(self, config: EngineConfig) -> PrefillPlan:
        return idle_prefill(config, self.shape)

    def mask_rows(self) -> tuple[int, int]:
        return self.shape.rows, 1

    def output(self, config: EngineConfig) -> StepOutput:
        return prefill_output(config, self.shape, scores=self.scores)

    def parts(self, state: step.State) -> tuple:
        return (state,)

    def joined(self, state: step.State, written: step.State) -> step.State:
        return written


@dataclass(frozen=True)
class Round(Call):
    """A round of any requests."""

    shape: RoundShape

    def __str__(self) -> str:
        size, num_draft = self.shape
        return f"the program of {self._kind}rounds of {size} requests with {num_draft} drafts"

    _kind = ""

    def lower(self, functions: Functions, state: step.State) -> Callable:
        repeat = self.repeat(functions.config)
        return partial(functions.round.lower, num_draft=self.shape.num_draft, repeat=repeat)

    def repeat(self, config: EngineConfig) -> int:
        """Rounds of one call."""
        return 1

    def idle_plan(self, config: EngineConfig) -> DecodePlan:
        return DecodeCall.build([], self.shape, config).plan

    def mask_rows(self) -> tuple[int, int] | None:
        return self.shape.size, self.shape.num_draft + 1

    def output(self, config: EngineConfig) -> StepOutput:
        return round_output(config, self.shape, is_greedy=False)

    def parts(self, state: step.State) -> tuple[step.State, ReadOnly]:
        kept = read_only(state)
        return without(state, kept), kept

    def joined(self, state: step.State, written: step.State) -> step.State:
        return join(written, (state.params, state.controls))


@dataclass(frozen=True)
class GreedyRound(Round):
    """Rounds without branches, for greedy requests without logprobs, controls and masks
    (`DecodeCall.is_greedy`)."""

    _kind = "greedy "

    def repeat(self, config: EngineConfig) -> int:
        return config.repeat

    def mask_rows(self) -> None:
        return None

    def output(self, config: EngineConfig) -> StepOutput:
        return round_output(config, self.shape, is_greedy=True)

    def parts(self, state: step.State) -> tuple[step.State, ReadOnly]:
        kept = greedy_only(state.params), None
        return without(state, kept), kept


@dataclass(frozen=True)
class WriteControls(Program):
    """Writes the sampling controls of one request."""

    def __str__(self) -> str:
        return "the program of controls"

    def lower(self, functions: Functions, state: step.State) -> Callable:
        return functions.controls.lower

    def operands(self, functions: Functions, state: step.State) -> tuple:
        return _specs(state.controls, pack(idle_controls(functions.config)))

    def results(self, operands: tuple):
        return operands[0]

    def run(self, program: Callable, state: step.State, plan: ControlsPlan) -> step.State:
        """Dispatches the write; `state` is consumed."""
        return replace(state, controls=program(state.controls, pack(plan)))


@dataclass(frozen=True)
class CopyRings(Program):
    """Copies the rings of all layers from one row to another."""

    def __str__(self) -> str:
        return "the program of rings"

    def lower(self, functions: Functions, state: step.State) -> Callable:
        return ring_copies.program(ring_copies.operands(state)[0]).lower

    def operands(self, functions: Functions, state: step.State) -> tuple:
        return _specs(*ring_copies.operands(state))

    def results(self, operands: tuple):
        return operands[0]

    def run(self, program: Callable, state: step.State, source: int, target: int) -> step.State:
        """Dispatches the copy; `state` is consumed."""
        copied = program(*ring_copies.operands(state, source, target))
        return ring_copies.with_copied(state, copied)
