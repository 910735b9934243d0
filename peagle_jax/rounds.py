"""Several rounds in one call, for batches whose rounds need nothing from the host in between."""

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax import step
from peagle_jax.plan import DecodePlan


def speculative_rounds(
    target,
    drafter,
    state: step.State,
    plan: DecodePlan,
    *,
    repeat: int,
    **rules,
) -> tuple[step.State, step.StepOutput]:
    """`repeat` rounds, one after the other, of a plan without constrained rows.

    Arguments as in `step.speculative_step`. From the second round on all K drafts are verified, because the round
    before made them in the same call.

    Returns:
      The state after the last round, and the outputs of all rounds with a leading axis.
    """
    K = 0 if drafter is None else drafter.num_draft
    run_round = lambda state, plan: step.speculative_step(target, drafter, state, plan, **rules)

    def body(i, carry):
        state, outputs = carry
        pending = jnp.where(i == 0, plan.pending, K)
        state, output = run_round(state, plan._replace(pending=pending))
        return state, jax.tree.map(lambda stack, new: stack.at[i].set(new), outputs, output)

    shapes = jax.eval_shape(run_round, state, plan)[1]
    blank = jax.tree.map(lambda x: jnp.zeros((repeat, *x.shape), x.dtype), shapes)
    return lax.fori_loop(0, repeat, body, (state, blank))
