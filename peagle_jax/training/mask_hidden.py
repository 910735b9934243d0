"""Hidden states of P-EAGLE's mask rows in the forms that the paper's ablation compares.

A mask row stands for a token that is not known yet, so the target has no state for it. With m =
`fuse(mask_hidden)` and fuse(g_a), the state of the last row before the mask rows (the paper's state of
next-token prediction), the row of anchor a at depth d has

    shared  m                               every released head, and every file of this project
    depth   m + e_d                         e_d: a learned vector for each depth, 0 at the start
    token   m + fuse(g_a)
    both    m + e_d + fuse(g_a)
    mix     m + alpha fuse(g_a)             alpha: a learned number, 0.1 at the start

The formulas are our reading: the simplest that fit the paper's names of the forms and its alpha, which fell from
0.1 to 0.029. Heads of the other forms exist in training only: no file has their weights, and no engine reads
them.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.training.picked import Picked, narrowed
from peagle_jax.training.texts import Blocks

Hidden = Literal["shared", "depth", "token", "both", "mix"]
_ALPHA = 0.1


class VariedHead(DraftHead):
    """A P-EAGLE head of another form than `shared`, for K_train = `config.trained_num_draft`."""

    def __init__(self, config: DrafterConfig, form: Hidden, *, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        # The optimiser takes arrays of two dimensions for matrices, and these are vectors.
        shape = (config.trained_num_draft - 1, 1, config.hidden_size)
        has_depths = form in ("depth", "both")
        self.mask_depths = nnx.Param(jnp.zeros(shape, dtype)) if has_depths else None
        self.mask_alpha = nnx.Param(jnp.full((), _ALPHA, dtype)) if form == "mix" else None
        self.mask_reads_token = form in ("token", "both", "mix")


def mask_states(
    head: DraftHead, fused: jax.Array, blocks: Blocks, picked: Picked | None
) -> jax.Array:
    """States of the rows of the depths from 1 on.

    Args:
      fused: [B, S, D], `head.fuse` of the target's states.
    Returns:
      [R - B, P, D], of all S anchors without `picked`; axes of equal states have length 1.
    Raises:
      ValueError: a depth that the head has no vector for.
    """
    states = head.fuse(head.mask_hidden[...])[None, None]
    if not isinstance(head, VariedHead):
        return states
    B = blocks.sizes[0]
    if head.mask_depths is not None:
        depth: np.ndarray = blocks.depth[B:]
        if len(depth) and depth.max() > len(head.mask_depths[...]):
            raise ValueError(f"depth {depth.max()}, and vectors for {len(head.mask_depths[...])}")
        states = states + head.mask_depths[depth - 1]
    if head.mask_reads_token:
        anchors = fused if picked is None else narrowed(fused, *picked)
        known = blocks.spread(anchors)[B:]
        states = states + (known if head.mask_alpha is None else head.mask_alpha[...] * known)
    return states
