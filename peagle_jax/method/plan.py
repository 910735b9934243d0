"""Inputs of one device call, in fixed shapes: one row per request. No jax here.

The scheduler fills a plan with numpy arrays, `engine.device.transfer` copies it to the device, and
the step reads the same fields there. A NamedTuple is a pytree without being registered, so this
file serves both sides. Padding rows have the dummy slot `max_num_seqs`, the dummy page 0 and count
0. Axis letters are defined in docs/architecture.md.

A call may also have a mask: int32 [B, K+1, mask_words(V)] for a round and [R, 1, mask_words(V)] for
prefill, a numpy array beside the plan. Bit t % 32 (the least significant first) of word t // 32
allows token t, the layout of llguidance and xgrammar. Row j of a round constrains the token after
drafts d_1..d_j. A mask holds for the rows whose `constrained` is 1. There every word must be set,
all ones (-1) where anything is allowed, also behind a draft that the row before forbids: such rows
are computed and never used. A row of zeros that is used fails its request. Masks lie in device
memory between calls, and only a call with a constrained row sends one.
"""

from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A numpy array on the host, a `jax.Array` on the device."""

RAW, SAMPLED = 1, 2
"""Values of `RequestParams.scored`: the law of the model, and the law that samples; 0 is none."""


class RequestParams(NamedTuple):
    """Sampling parameters, one row per slot or per row of a call."""

    seed: Array  # [B, 2] uint32, high and low word
    temperature: Array  # [B] float32
    top_k: Array  # [B] int32
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32
    num_draft: Array  # [B] int32
    scored: Array  # [B] int32, the law of the log-probabilities: 0 (none), RAW or SAMPLED
    adjusts: Array  # [B] int32, 1: the controls of the slot hold, see `ControlsPlan`


def idle_params(rows: int) -> RequestParams:
    """Parameters of rows without a request: greedy, no filter, no drafts. Numpy arrays to fill."""
    ints = lambda value=0: np.full(rows, value, np.int32)
    floats = lambda value=0.0: np.full(rows, value, np.float32)
    return RequestParams(
        seed=np.zeros((rows, 2), np.uint32),
        temperature=floats(),
        top_k=ints(),
        top_p=floats(1.0),
        min_p=floats(),
        num_draft=ints(),
        scored=ints(),
        adjusts=ints(),
    )


def greedy_only(params: RequestParams) -> RequestParams:
    """The parameters of a round whose requests are all greedy, want no logprobs and have no
    controls.

    All others are None. The program of such a round has no branches, see `step.speculative_step`.
    """
    nothing = dict.fromkeys(RequestParams._fields)
    return RequestParams(**nothing | {"seed": params.seed, "num_draft": params.num_draft})


class PrefillPlan(NamedTuple):
    """One prefill call: a chunk of up to T tokens for each of R rows
    (`engine.host.prefill_shapes`)."""

    slots: Array  # [R] int32
    tokens: Array  # [R, T] int32, 0 after count
    start: Array  # [R] int32, position of tokens[:, 0]
    count: Array  # [R] int32, real tokens in the row
    next_token: Array  # [R] int32, the token after the chunk; -1: the device samples it
    page_table: Array  # [R, W] int32, 0 (the dummy page) where no page is mapped
    constrained: Array  # [R] int32, 1: the row's mask holds
    params: RequestParams


class DecodePlan(NamedTuple):
    """One round over a batch bucket of B rows. Without constrained and timed rows the last three
    may be None."""

    slots: Array  # [B] int32
    page_table: Array  # [B, W] int32
    pending: Array  # [B] int32, drafts that the call before made, at most K; later ones are stale
    constrained: Array  # [B] int32, 1: the row's mask holds
    forced: Array
    """[B, K] int32: drafts to verify in place of the drafter's; -1 keeps the drafter's."""
    newest: Array | None = None
    """[B] int32: of a row that runs over the dummy slot to be timed, the token that it reads in
    place of the sequence's newest; it verifies all its drafts. -1 in all other rows."""


class ControlsPlan(NamedTuple):
    """Sampling controls of one request, for `adjust.fill`: sent when a request that has some is
    admitted."""

    slot: Array  # [] int32
    tokens: Array  # [max_model_len] int32, prompt and output
    num_prompt: Array  # [] int32
    num_tokens: Array  # [] int32
    bias_ids: Array  # [MAX_BIAS] int32, this and the rest: see `adjust.Controls`
    bias: Array  # [MAX_BIAS] float32
    base: Array  # [] float32
    end_ids: Array  # [MAX_END_IDS] int32
    min_end: Array  # [] int32
    repetition: Array  # [] float32
    frequency: Array  # [] float32
    presence: Array  # [] float32


def mask_words(vocab_size: int) -> int:
    """Number of int32 words of a mask over the vocabulary, one bit per token."""
    return -(-vocab_size // 32)
