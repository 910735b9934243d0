"""Several rounds in one call, for batches whose rounds need nothing from the host in between."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.method import step
from peagle_jax.method.plan import DecodePlan
from peagle_jax.parallel import partition


def speculative_rounds(
    models: Callable[[], tuple],
    run_round: Callable,
    state: step.State,
    plan: DecodePlan,
    repeat: int,
) -> tuple[step.State, step.StepOutput]:
    """`repeat` rounds, one after the other, of a plan without constrained rows.

    From the second round on all K drafts are verified, because the round before made them in the
    same call.

    Args:
      models: returns target and drafter. It is called in the loop's body, see `Devices.leaves`.
      run_round: `step.speculative_step`, with its rules.
      state, plan: as there.
      repeat: number of rounds.
    Returns:
      The state after the last round, and the outputs of all rounds with a leading axis.
    """

    def round_of(i, state):
        target, drafter = models()
        K = 0 if drafter is None else drafter.num_draft
        pending = jnp.where(i == 0, plan.pending, K)
        return run_round(target, drafter, state, plan._replace(pending=pending))

    def body(i, carry):
        state, outputs = carry
        state, output = round_of(i, state)
        return state, jax.tree.map(lambda stack, new: stack.at[i].set(new), outputs, output)

    shapes = jax.eval_shape(round_of, 0, state)[1]
    blank = jax.tree.map(lambda x: jnp.zeros((repeat, *x.shape), x.dtype), shapes)
    return partition.repeat(repeat, body, (state, blank))
