"""The device calls of one engine step: requests, and the plans filled for them with numpy
arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.prefill_shapes import PrefillShape, choose_shape, full_shape
from peagle_jax.engine.host.request import Request, RingCopy
from peagle_jax.method.plan import (
    RAW,
    SAMPLED,
    ControlsPlan,
    DecodePlan,
    PrefillPlan,
    RequestParams,
    idle_params,
)
from peagle_jax.options import options_of
from peagle_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle_jax.engine.structured.grammar import Matcher

Window = tuple["Matcher | None", Sequence[int]]
"""The constraint of a row, and the drafts that the call verifies."""


def _masks(rows: Sequence[Window], *, size: int, height: int) -> np.ndarray | None:
    """See `masks_of`, which needs llguidance: only a call with a constrained row imports it."""
    if all(matcher is None for matcher, _ in rows):
        return None
    from peagle_jax.engine.structured.grammar import masks_of

    return masks_of(rows, size=size, height=height)


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillCall:
    """One prefill call. Padding rows have request None."""

    requests: tuple[Request | None, ...]  # R
    last: tuple[bool, ...]  # per real row: this is the request's last chunk, it decodes next
    plan: PrefillPlan
    shape: PrefillShape
    controls: tuple[
        ControlsPlan, ...
    ] = ()  # of newly admitted requests: dispatched before the call
    restores: tuple[RingCopy, ...] = ()  # of saved rings to slots: dispatched before the call
    saves: tuple[RingCopy, ...] = ()  # of slots' rings: dispatched after the call
    scores: bool = False  # whether the call scores the tokens of prompts
    mask: np.ndarray | None = None  # [R, 1, mask_words(V)] int32 for constrained rows, see `plan`

    @classmethod
    def build(
        cls,
        rows: Sequence[Request],
        config: EngineConfig,
        controls: tuple[ControlsPlan, ...] = (),
        restores: tuple[RingCopy, ...] = (),
        shapes: Sequence[PrefillShape] = (),
        may_be_long: bool = True,
    ) -> Self:
        """Plans the next chunk of each request in `rows` (at most R).

        Args:
          shapes, may_be_long: as of `choose_shape`; without shapes the call has `full_shape`.
        """
        scores = any(request.wants_prompt_logprobs for request in rows)
        remaining = [request.num_to_prefill - request.num_prefilled for request in rows]
        some = shapes if shapes and not scores else (full_shape(config),)
        shape = R, T = choose_shape(some, remaining, may_be_long)
        plan = idle_prefill(config, shape)
        plan = plan._replace(page_table=_page_table(rows, R, config.pages_per_seq))
        ends = [min(r.num_prefilled + T, r.num_to_prefill) for r in rows]
        for row, (request, end) in enumerate(zip(rows, ends, strict=True)):
            start = request.num_prefilled
            count, chunk = end - start, request.tokens[start : end + 1]
            plan.slots[row] = request.slot
            plan.tokens[row, :count] = chunk[:count]
            plan.start[row], plan.count[row] = start, count
            if len(chunk) > count:
                plan.next_token[row] = chunk[count]
            _write_params(plan.params, row, request)
            plan.constrained[row] = request.matcher is not None and plan.next_token[row] < 0
        matchers = (r.matcher if plan.constrained[row] else None for row, r in enumerate(rows))
        return cls(
            requests=(*rows, *[None] * (R - len(rows))),
            last=tuple(end == r.num_to_prefill for r, end in zip(rows, ends, strict=True)),
            plan=plan,
            shape=shape,
            controls=controls,
            restores=restores,
            scores=scores,
            mask=_masks([(matcher, ()) for matcher in matchers], size=R, height=1),
        )

    def samples(self, row: int) -> bool:
        """Whether the device samples a token for the row: the chunk ends a prompt without
        output."""
        return self.requests[row] is not None and bool(self.plan.next_token[row] < 0)


class RoundShape(NamedTuple):
    """Shape of a round: its program is compiled for it."""

    size: int  # batch bucket: rows of the plan, padding included
    num_draft: int  # K, drafts that the round makes for each row, and the most that it verifies


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeCall:
    """One speculative round of K = `num_draft`, or several. Padding rows have request None."""

    requests: tuple[Request | None, ...]  # B
    shape: RoundShape
    drafted: tuple[int, ...]  # per real row: drafts that the round verifies
    plan: DecodePlan
    mask: np.ndarray | None = None  # [B, K+1, mask_words(V)] int32 for constrained rows, see `plan`
    repeat: int = 1  # rounds that the call runs

    @property
    def num_draft(self) -> int:
        """K, see `RoundShape`."""
        return self.shape.num_draft

    @cached_property
    def rows(self) -> list[Request]:
        """The requests, without padding."""
        return [request for request in self.requests if request is not None]

    @cached_property
    def drafted_again(self) -> tuple[int, ...]:
        """As `drafted`, for the rounds after the first one: all drafts before them are fresh."""
        return tuple(min(self.num_draft, request.num_draft) for request in self.rows)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether no request needs a branch of the round's program, see `Programs.round`."""
        return not any(request.needs_branch for request in self.rows)

    def is_again(self, rows: list[Request], shape: RoundShape) -> bool:
        """Whether a round of `shape` for `rows` would be this one, if their slots and pages are the
        same."""
        if self.shape != shape or self.rows != rows or self._is_constrained:
            return False
        pending = [min(request.pending, shape.num_draft) for request in rows]
        return pending == self._pending

    @cached_property
    def _pending(self) -> list[int]:
        return self.plan.pending[: len(self.rows)].tolist()

    @cached_property
    def _is_constrained(self) -> bool:
        return any(request.matcher is not None for request in self.rows)

    @classmethod
    def build(
        cls,
        rows: Sequence[Request],
        shape: RoundShape,
        config: EngineConfig,
        repeat: int = 1,
    ) -> Self:
        """Plans a round of `shape` for `rows`, at most `shape.size` requests.

        Args:
          repeat: rounds of the call, if no request needs a branch.
        """
        size, num_draft = shape.size, shape.num_draft
        slots, pending = np.full(size, config.max_num_seqs, np.int32), np.zeros(size, np.int32)
        slots[: len(rows)] = [request.slot for request in rows]
        # At most K: the plan then stays the same from round to round, and is not uploaded again.
        pending[: len(rows)] = [min(request.pending, num_draft) for request in rows]
        plan = DecodePlan(
            slots=slots,
            page_table=_page_table(rows, size, config.pages_per_seq),
            pending=pending,
            constrained=np.zeros(size, np.int32),
            forced=np.full((size, num_draft), -1, np.int32),
            newest=np.full(size, -1, np.int32),
        )
        drafted = tuple(min(num_draft, r.num_draft, r.pending) for r in rows)
        windows: list[Window] = []
        for row, (request, count) in enumerate(zip(rows, drafted, strict=True)):
            if request.matcher is not None:
                forced = request.force_drafts(count)
                plan.constrained[row], plan.forced[row, : len(forced)] = 1, forced
            windows.append((request.matcher, request.drafts[:count]))
        return cls(
            requests=(*rows, *[None] * (size - len(rows))),
            shape=shape,
            drafted=drafted,
            plan=plan,
            mask=_masks(windows, size=size, height=num_draft + 1),
            repeat=1 if any(request.needs_branch for request in rows) else repeat,
        )


def timed_plan(shape: RoundShape, vocab_size: int, config: EngineConfig) -> DecodePlan:
    """A round over the dummy slot whose rows read different tokens, the same ones each time.

    Equal tokens would choose equal experts, and a round of many rows would read a fraction of the
    weights that a round of texts reads. The rows of the dummy slot leave no trace in the state of a
    request.
    """
    plan = DecodeCall.build([], shape, config).plan
    tokens = np.random.default_rng(0).integers(
        vocab_size, size=(shape.size, shape.num_draft + 1), dtype=np.int32
    )
    return plan._replace(newest=tokens[:, 0], forced=tokens[:, 1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """The device calls of one engine step. If empty while `has_work`: commit, then schedule again.

    Dispatch `prefills` in order, since one may continue a prompt where the one before ends. The
    round does not depend on them.
    """

    prefills: tuple[PrefillCall, ...]
    decode: DecodeCall | None


def idle_prefill(config: EngineConfig, shape: PrefillShape) -> PrefillPlan:
    """A prefill plan of padding rows only."""
    R, T = shape
    ints = lambda fill=0: np.full(R, fill, np.int32)
    return PrefillPlan(
        slots=ints(config.max_num_seqs),
        tokens=np.zeros((R, T), np.int32),
        start=ints(),
        count=ints(),
        next_token=ints(-1),
        page_table=_page_table([], R, config.pages_per_seq),
        constrained=ints(),
        params=idle_params(R),
    )


_AS_ASKED = sorted({*RequestParams._fields} & {*options_of(SamplingParams)} - {"seed"})
"""Fields that a row has from `SamplingParams` as they are."""


def _write_params(params: RequestParams, row: int, request: Request) -> None:
    """Writes a request's sampling parameters to row `row` of `params`."""
    asked = request.params
    for name in _AS_ASKED:
        getattr(params, name)[row] = getattr(asked, name)
    params.seed[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
    params.num_draft[row], params.adjusts[row] = request.num_draft, asked.is_adjusted
    if asked.logprobs is not None:
        params.scored[row] = RAW if asked.logprobs_mode == "raw" else SAMPLED


def _page_table(rows: Sequence[Request], size: int, width: int) -> np.ndarray:
    """[size, width] int32: page id of each `page_size` positions, the dummy page where unmapped."""
    table = np.zeros((size, width), np.int32)
    for row, request in enumerate(rows):
        table[row, : len(request.pages)] = request.pages
    return table
