"""The rule for texts in bfloat16: two may part only at a tie."""

from collections.abc import Sequence

TIE = 0.1
"""Nats. A float32 logit computed from bfloat16 activations carries an error of a few parts in 2^8
of the largest logit; rows of another shape may round it the other way."""


def assert_parts_only_at_ties(plain: Sequence, others: Sequence) -> None:
    """Completions of plain decoding with `logprobs=2`, and others of the same prompts."""
    for one, other in zip(plain, others, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is not None:
            (_, best), (_, second) = one.logprobs[parted].top
            assert best - second < TIE, f"parted at token {parted} without a tie"
