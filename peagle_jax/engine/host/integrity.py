"""Invariants of requests between two steps of the scheduler. No jax here."""

from collections.abc import Sequence

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.request import Request, RequestState

MAX_IN_FLIGHT = 2  # the round being dispatched, and the one before it


def check_requests(
    waiting: Sequence[Request], active: Sequence[Request], config: EngineConfig
) -> None:
    """Raises `AssertionError` if a request is impossible, or out of order."""
    for requests in (waiting, active):
        ranks = [request.rank for request in requests]
        assert ranks == sorted(ranks), f"out of order: {ranks}"
    for request in waiting:
        assert request.state is RequestState.WAITING, f"{request.id} waits as {request.state}"
        assert request.slot is None, f"{request.id} waits and holds a slot"
        assert not request.pages, f"{request.id} waits and holds pages"
        assert request.num_prefilled == 0, f"{request.id} waits and is prefilled"
    for request in active:
        is_running = request.state is RequestState.RUNNING
        assert is_running or request.state is RequestState.PREFILL, f"{request.id} {request.state}"
        assert is_running or request.in_flight == 0, f"{request.id} decodes before its prefill"
        held = len(request.pages) * config.page_size
        assert request.committed <= held, f"{request.id} has KV outside of its pages"
        assert len(request.pages) <= config.pages_per_seq, f"{request.id} holds too much"
        published = len(request.chain) * config.page_size
        assert published <= request.committed, (
            f"{request.id} published a page beyond its committed tokens"
        )
    most = MAX_IN_FLIGHT * config.repeat
    for request in [*waiting, *active]:
        assert request.prefill_in_flight <= request.in_flight <= most, request.id
        assert request.in_flight <= request.unread_drafts, request.id
        assert len(request.output) < request.params.max_tokens, f"{request.id} is complete"
        assert request.num_tokens < config.max_model_len, f"{request.id} is complete"
