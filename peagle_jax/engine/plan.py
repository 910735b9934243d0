"""Inputs of one device call: numpy arrays of fixed shape, one row per request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillPlan:
    """One prefill call: a chunk of up to T = prefill_chunk tokens for each of R = prefill_rows rows.

    Padding rows have request None, the dummy slot `max_num_seqs`, count 0 and the dummy page.
    """

    requests: tuple[Request | None, ...]  # R
    slots: np.ndarray  # [R] int32
    tokens: np.ndarray  # [R, T] int32, 0 after count
    start: np.ndarray  # [R] int32, position of the first token
    count: np.ndarray  # [R] int32, real tokens in the row
    next_token: np.ndarray  # [R] int32, the token after the chunk; -1: the device samples it
    last: tuple[bool, ...]  # per real row: this is the request's last chunk, it decodes next
    page_table: np.ndarray  # [R, W] int32, 0 (the dummy page) where no page is mapped
    temperature: np.ndarray  # [R] float32
    top_k: np.ndarray  # [R] int32
    top_p: np.ndarray  # [R] float32
    min_p: np.ndarray  # [R] float32
    seed: np.ndarray  # [R, 2] uint32, high and low word
    num_draft: np.ndarray  # [R] int32
    num_logprobs: np.ndarray  # [R] int32, -1 for none

    @classmethod
    def build(cls, rows: Sequence[Request], config: EngineConfig) -> Self:
        """Plans the next chunk of each request in `rows` (at most R)."""
        R, T = config.prefill_rows, config.prefill_chunk
        ints = lambda fill=0: np.full(R, fill, np.int32)
        floats = lambda fill=0.0: np.full(R, fill, np.float32)
        ends = [min(r.num_prefilled + T, r.num_to_prefill) for r in rows]
        plan = cls(
            requests=(*rows, *[None] * (R - len(rows))),
            slots=ints(config.max_num_seqs),
            tokens=np.zeros((R, T), np.int32),
            start=ints(),
            count=ints(),
            next_token=ints(-1),
            last=tuple(end == r.num_to_prefill for r, end in zip(rows, ends, strict=True)),
            page_table=_page_table(rows, R, config.pages_per_seq),
            temperature=floats(),
            top_k=ints(),
            top_p=floats(1.0),
            min_p=floats(),
            seed=np.zeros((R, 2), np.uint32),
            num_draft=ints(),
            num_logprobs=ints(-1),
        )
        for row, (request, end) in enumerate(zip(rows, ends, strict=True)):
            start, params = request.num_prefilled, request.params
            count, chunk = end - start, request.tokens[start : end + 1]
            plan.slots[row] = request.slot
            plan.tokens[row, :count] = chunk[:count]
            plan.start[row], plan.count[row] = start, count
            if len(chunk) > count:
                plan.next_token[row] = chunk[count]
            plan.temperature[row], plan.top_k[row] = params.temperature, params.top_k
            plan.top_p[row], plan.min_p[row] = params.top_p, params.min_p
            plan.seed[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
            plan.num_draft[row] = request.num_draft
            if params.logprobs is not None:
                plan.num_logprobs[row] = params.logprobs
        return plan

    def samples(self, row: int) -> bool:
        """Whether the device samples a token for the row: the chunk ends a prompt without output."""
        return self.requests[row] is not None and bool(self.next_token[row] < 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """One speculative round over a batch bucket of B rows; padding rows as in `PrefillPlan`."""

    requests: tuple[Request | None, ...]  # B
    slots: np.ndarray  # [B] int32
    page_table: np.ndarray  # [B, W] int32

    @classmethod
    def build(cls, rows: Sequence[Request], size: int, config: EngineConfig) -> Self:
        slots = np.full(size, config.max_num_seqs, np.int32)
        slots[: len(rows)] = [request.slot for request in rows]
        return cls(
            requests=(*rows, *[None] * (size - len(rows))),
            slots=slots,
            page_table=_page_table(rows, size, config.pages_per_seq),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The device calls of one engine step. If empty while `has_work`: commit, then schedule again.

    Dispatch `prefills` in order, since one may continue a prompt where the one before ends. The round
    does not depend on them.
    """

    prefills: tuple[PrefillPlan, ...]
    decode: DecodePlan | None


def _page_table(rows: Sequence[Request], size: int, width: int) -> np.ndarray:
    """[size, width] int32: page id of each `page_size` positions, the dummy page where unmapped."""
    table = np.zeros((size, width), np.int32)
    for row, request in enumerate(rows):
        table[row, : len(request.pages)] = request.pages
    return table
