"""`step.prefill` and `step.speculative_step` driven by hand: a given text, chosen acceptance.

The target decides nothing here: the acceptance rule emits the given text, so a test says how many
drafts survive each round and compares what the drafter proposes next.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.method import step
from peagle_jax.method.drafter import Drafter, with_num_draft
from peagle_jax.method.plan import DecodePlan, PrefillPlan, RequestParams
from peagle_jax.method.verify import Verdict, verify
from peagle_jax.models import Decoder
from tests.request_params import request_params


def accept_text(text: jax.Array):
    """Rule that emits `text[seed, position]`; `num_draft` of the row is how many drafts survive."""

    def accept(
        logits, drafts, draft_probs, positions, params: RequestParams, adjustments
    ) -> Verdict:
        tokens = text[params.seed[:, 1][:, None], positions]
        return Verdict(tokens, jnp.minimum(params.num_draft + 1, positions.shape[1]))

    return accept


@dataclass(frozen=True)
class Rig:
    """B sequences, one per slot, with pages of their own scattered over the pool.

    `text` [B, L] holds what each sequence says; drafting may look up to J + 1 positions past L,
    where the text is taken to be zeros. With `greedy` the target decides after all, at temperature
    0.
    """

    target: Decoder
    drafter: Drafter
    config: EngineConfig
    text: np.ndarray
    greedy: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.text)

    @cached_property
    def padded(self) -> np.ndarray:
        """Text [B+1, L + 2J + 2], with a row for the dummy slot."""
        return np.pad(self.text, ((0, 1), (0, 2 * self.config.num_draft + 2))).astype(np.int32)

    @cached_property
    def page_table(self) -> np.ndarray:
        pages = 1 + np.random.default_rng(0).permutation(self.config.total_pages - 1)
        W = self.config.pages_per_seq
        return pages[: self.num_rows * W].reshape(self.num_rows, W).astype(np.int32)

    @cached_property
    def _jitted(self):
        head = self.drafter.head.config
        accept = verify if self.greedy else accept_text(jnp.asarray(self.padded))
        rule = dict(taps=head.taps, accept=accept)
        return tuple(jax.jit(partial(f, **rule)) for f in (step.prefill, step.speculative_step))

    def new_state(self) -> step.State:
        return step.init_state(self.target.config, self.drafter.head.config, self.config)

    def _params(self, accepted) -> RequestParams:
        seed = [[0, row] for row in range(self.num_rows)]
        return request_params(
            self.num_rows, seed=seed, temperature=not self.greedy, num_draft=accepted
        )

    def _only(self, rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Who takes part [B], and slots and page table in which the others are padding."""
        everyone = np.arange(self.num_rows)
        taking_part = np.isin(everyone, everyone if rows is None else rows)
        slots = np.where(taking_part, everyone, self.config.max_num_seqs).astype(np.int32)
        return taking_part, slots, self.page_table * taking_part[:, None]

    def prefill(
        self, state: step.State, start, end, *, final: bool = True, rows=None, num_draft=None
    ):
        """Sends text[start:end] of every sequence (of `rows`); ends the prompts if `final`."""
        B, T = self.num_rows, self.config.prefill_chunk
        start, end = (np.broadcast_to(np.asarray(x, np.int32), B) for x in (start, end))
        taking_part, slots, page_table = self._only(rows)
        count = np.where(taking_part, end - start, 0).astype(np.int32)
        tokens = np.zeros((B, T), np.int32)
        for b in np.flatnonzero(count):
            tokens[b, : count[b]] = self.text[b, start[b] : end[b]]
        plan = PrefillPlan(
            slots=slots,
            tokens=tokens,
            start=start * taking_part,
            count=count,
            next_token=np.full(B, -1, np.int32) if final else self.padded[np.arange(B), end],
            page_table=page_table,
            constrained=np.zeros(B, np.int32),
            params=self._params(np.full(B, self.config.num_draft)),
        )
        drafter = with_num_draft(self.drafter, num_draft or self.config.num_draft)
        return self._jitted[0](self.target, drafter, state, plan)

    def round(
        self, state: step.State, accepted, *, right=None, rows=None, num_draft=None, pending=None
    ):
        """One round of K = `num_draft` (J) in which `accepted` [B] drafts of each sequence may
        survive.

        The first `right` drafts say what the text says, the others do not; without it, those that
        may survive are right. Only the first `pending` (J) of them are proposals.
        """
        B, J = self.num_rows, self.config.num_draft
        drafter = with_num_draft(self.drafter, J if num_draft is None else num_draft)
        ahead = np.asarray(state.length)[:B, None] + 1 + np.arange(J)
        truth = self.padded[np.arange(B)[:, None], ahead]
        wrong = (truth + 1) % self.target.config.vocab_size
        right = np.asarray(accepted if right is None else right)
        drafts = np.where(np.arange(J) < right[:, None], truth, wrong)
        taking_part, slots, page_table = self._only(rows)
        put = lambda old, new: old.at[np.flatnonzero(taking_part)].set(new[taking_part])
        state = replace(
            state,
            drafts=put(state.drafts, drafts),
            params=jax.tree.map(put, state.params, self._params(accepted)),
        )
        pending = np.full(B, J if pending is None else pending, np.int32)
        plan = DecodePlan(
            slots=slots,
            page_table=page_table,
            pending=pending,
            constrained=np.zeros(B, np.int32),
            forced=np.full((B, drafter.num_draft), -1, np.int32),
        )
        return self._jitted[1](self.target, drafter, state, plan)
