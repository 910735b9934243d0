"""Inputs of one device call, in fixed shapes: one row per request. No jax here.

The scheduler fills a plan with numpy arrays, `engine.transfer` copies it to the device, and the step
reads the same fields there. A NamedTuple is a pytree without being registered, so this file serves both
sides. Padding rows have the dummy slot `max_num_seqs`, the dummy page 0 and count 0. Axis letters are
defined in docs/architecture.md.
"""

from typing import Any, NamedTuple

Array = Any
"""A numpy array on the host, a `jax.Array` on the device."""


class RequestParams(NamedTuple):
    """Sampling parameters, one row per slot or per row of a call."""

    seed: Array  # [B, 2] uint32, high and low word
    temperature: Array  # [B] float32
    top_k: Array  # [B] int32
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32
    num_draft: Array  # [B] int32
    num_logprobs: Array  # [B] int32, -1 for none


class PrefillPlan(NamedTuple):
    """One prefill call: a chunk of up to T = prefill_chunk tokens for each of R = prefill_rows rows."""

    slots: Array  # [R] int32
    tokens: Array  # [R, T] int32, 0 after count
    start: Array  # [R] int32, position of tokens[:, 0]
    count: Array  # [R] int32, real tokens in the row
    next_token: Array  # [R] int32, the token after the chunk; -1: the device samples it
    page_table: Array  # [R, W] int32, 0 (the dummy page) where no page is mapped
    params: RequestParams


class DecodePlan(NamedTuple):
    """One round over a batch bucket of B rows."""

    slots: Array  # [B] int32
    page_table: Array  # [B, W] int32
    pending: Array  # [B] int32, drafts that the call before made, at most K; later ones are stale
