"""Drafters of known texts, so that a test knows which drafts pass the target."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from peagle_jax import Engine
from peagle_jax.method.drafter import Proposal
from tests import tiny
from tests.programs import OneBucketConfig
from tests.serving.conftest import SIZES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KnownTextDrafter:
    """Drafts what a table has for each position of the one text there is."""

    drafts: jax.Array  # [max_model_len] int32
    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        """See `Drafter.propose`."""
        newest = (inputs.start + inputs.num_real)[:, None]
        places = newest + 1 + jnp.arange(self.num_draft)
        return Proposal(jnp.take(self.drafts, places, mode="clip"), None), cache


def known_text(target, prompt: list[int]) -> list[int]:
    """The prompt, and what the target writes after it until the model's length."""
    return prompt + tiny.greedy(target, [prompt], SIZES["max_model_len"] - len(prompt))[0]


def known_text_engine(target, tokenizer, text: list[int], *, is_perfect: bool = False) -> Engine:
    """An engine that drafts a `known_text`, at every fifth and seventh position another token: so
    rounds with every number of accepted drafts occur, from none to all.

    Args:
      is_perfect: all drafts are right.
    """
    config, right, places = OneBucketConfig(**SIZES), jnp.array(text), jnp.arange(len(text))
    is_wrong = ((places % 5 == 0) | (places % 7 == 0)) & (not is_perfect)
    drafter = KnownTextDrafter(jnp.where(is_wrong, right // 2, right), config.num_draft)
    return Engine(target, None, config, tokenizer=tokenizer, drafter=drafter)
