"""Drafters of known texts, so that a test knows which drafts pass the target."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from peagle_jax import Engine, SamplingParams
from peagle_jax.method.drafter import Proposal
from tests.programs import OneBucketConfig
from tests.serving.conftest import SIZES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KnownTextDrafter:
    """Drafts what follows in the one text there is; at every fifth and seventh position another
    token.

    So rounds with every number of accepted drafts occur, from none to all.
    """

    text: jax.Array  # [n] int32, prompt and output
    num_draft: int = field(metadata=dict(static=True))
    is_perfect: bool = field(default=False, metadata=dict(static=True))
    """Then all drafts are right."""

    def propose(self, target, inputs, cache):
        """See `Drafter.propose`."""
        newest = (inputs.start + inputs.num_real)[:, None]
        places = newest + 1 + jnp.arange(self.num_draft)
        right = jnp.take(self.text, places, mode="clip")
        is_wrong = ((places % 5 == 0) | (places % 7 == 0)) & (not self.is_perfect)
        return Proposal(jnp.where(is_wrong, right // 2, right), None), cache


def known_text_engine(target, tokenizer, prompt: str) -> Engine:
    """An engine that drafts as `KnownTextDrafter` what the target writes after `prompt`."""
    config = OneBucketConfig(**SIZES)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    plain = Engine(target, None, config, tokenizer=tokenizer).generate([prompt], params)[0]
    text = jnp.array([*plain.prompt, *plain.tokens], jnp.int32)
    drafter = KnownTextDrafter(text, config.num_draft)
    return Engine(target, None, config, tokenizer=tokenizer, drafter=drafter)
