"""`step.prefill` and `step.speculative_step` driven by hand: a given text, chosen acceptance.

The target decides nothing here: the acceptance rule emits the given text, so a test says how many
drafts survive each round and compares what the drafter proposes next.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import step
from peagle_jax.config import EngineConfig
from peagle_jax.drafter import Drafter
from peagle_jax.models import Dense
from peagle_jax.sampling import RequestParams
from peagle_jax.verify import Verdict


def accept_text(text: jax.Array):
    """Rule that emits `text[seed, position]`; `num_draft` of the row is how many drafts survive."""

    def accept(logits, drafts, draft_probs, positions, params: RequestParams) -> Verdict:
        tokens = text[params.seed[:, 1][:, None], positions]
        return Verdict(tokens, jnp.minimum(params.num_draft + 1, positions.shape[1]))

    return accept


@dataclass(frozen=True)
class Rig:
    """B sequences, one per slot, with pages of their own scattered over the pool.

    `text` [B, L] holds what each sequence says; drafting may look up to J + 1 positions past L, where
    the text is taken to be zeros.
    """

    target: Dense
    drafter: Drafter
    config: EngineConfig
    text: np.ndarray

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
        rule = dict(taps=head.taps, accept=accept_text(jnp.asarray(self.padded)))
        return tuple(jax.jit(partial(f, **rule)) for f in (step.prefill, step.speculative_step))

    def new_state(self) -> step.State:
        return step.init_state(self.target.config, self.drafter.head.config, self.config)

    def _params(self, accepted) -> RequestParams:
        B = self.num_rows
        fill = lambda value, dtype: np.full(B, value, dtype)
        return RequestParams(
            seed=np.stack([np.zeros(B), np.arange(B)], axis=1).astype(np.uint32),
            temperature=fill(1, np.float32),
            top_k=fill(0, np.int32),
            top_p=fill(1, np.float32),
            min_p=fill(0, np.float32),
            num_draft=np.asarray(accepted, np.int32),
            num_logprobs=fill(-1, np.int32),
        )

    def prefill(self, state: step.State, start, end, *, final: bool = True, rows=None):
        """Sends text[start:end] of every sequence (of `rows`); ends the prompts unless not `final`."""
        B, T = self.num_rows, self.config.prefill_chunk
        start, end = (np.broadcast_to(np.asarray(x, np.int32), B) for x in (start, end))
        taking_part = np.isin(np.arange(B), np.arange(B) if rows is None else rows)
        count = np.where(taking_part, end - start, 0)
        tokens = np.zeros((B, T), np.int32)
        for b in np.flatnonzero(count):
            tokens[b, : count[b]] = self.text[b, start[b] : end[b]]
        following = self.padded[np.arange(B), end]
        plan = step.PrefillPlan(
            slots=np.where(taking_part, np.arange(B), self.config.max_num_seqs).astype(np.int32),
            tokens=tokens,
            start=np.where(taking_part, start, 0).astype(np.int32),
            count=count.astype(np.int32),
            next_token=np.full(B, -1, np.int32) if final else following,
            page_table=self.page_table * taking_part[:, None],
            params=self._params(np.zeros(B)),
        )
        return self._jitted[0](self.target, self.drafter, state, plan)

    def round(self, state: step.State, accepted):
        """One round in which `accepted` [B] drafts of each sequence are right and survive."""
        B, J = self.num_rows, self.config.num_draft
        ahead = np.asarray(state.length)[:B, None] + 1 + np.arange(J)
        truth = self.padded[np.arange(B)[:, None], ahead]
        wrong = (truth + 1) % self.target.config.vocab_size
        drafts = np.where(np.arange(J) < np.asarray(accepted)[:, None], truth, wrong)
        state = replace(
            state,
            drafts=state.drafts.at[:B].set(drafts),
            params=jax.tree.map(lambda a, b: a.at[:B].set(b), state.params, self._params(accepted)),
        )
        plan = step.DecodePlan(slots=np.arange(B, dtype=np.int32), page_table=self.page_table)
        return self._jitted[1](self.target, self.drafter, state, plan)
