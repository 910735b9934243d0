"""The functions that an engine's programs are compiled from."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from peagle_jax.config import EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.read_only import join, without
from peagle_jax.engine.device.transfer import pack_on_device, unpack
from peagle_jax.engine.host.controls import idle_controls
from peagle_jax.method import adjust, step
from peagle_jax.method.drafter import with_num_draft
from peagle_jax.method.repeated_rounds import speculative_rounds


class Functions(NamedTuple):
    """What the programs of an engine are made of.

    Attributes:
      prefill, round: functions under `jax.jit`, of the weights' leaves and of a call's operands.
      controls: likewise, of all controls and those of one request.
    """

    config: EngineConfig
    devices: Devices
    prefill: Callable
    round: Callable
    controls: Callable


def make_functions(
    structure,
    config: EngineConfig,
    devices: Devices,
    taps: tuple[int, ...],
    accept: step.AcceptRule,
) -> Functions:
    """The functions of an engine.

    Args:
      structure: of the tree (target, drafter), whose leaves are the weights.
      taps, accept: as in `step.speculative_step`.
    """

    def models(weights, num_draft):
        target, drafter = jax.tree.unflatten(structure, devices.leaves(weights))
        return target, with_num_draft(drafter, num_draft)

    # Donated buffers: the state (caches are updated in place) and the previous call's output.
    @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames="scores")
    @devices.program
    def prefill(weights, state, plan, mask, previous, *, scores):
        target, drafter = models(weights, config.num_draft)
        state, output = step.prefill(
            target,
            drafter,
            state,
            plan,
            mask,
            taps=taps,
            max_logprobs=config.max_logprobs,
            accept=accept,
            scores=scores,
        )
        return state, pack_on_device(output)

    def run_round(target, drafter, state, plan, mask=None):
        return step.speculative_step(
            target,
            drafter,
            state,
            plan,
            mask,
            taps=taps,
            max_logprobs=config.max_logprobs,
            accept=accept,
        )

    sizes = ("num_draft", "repeat")

    @partial(jax.jit, donate_argnums=(1, 4), keep_unused=True, static_argnames=sizes)
    @devices.program
    def speculative_step(weights, written, plan, mask, previous, kept, *, num_draft, repeat):
        own, state = partial(models, weights, num_draft), join(written, kept)
        if repeat > 1:
            state, output = speculative_rounds(own, run_round, state, plan, repeat)
        else:
            target, drafter = own()
            state, output = run_round(target, drafter, state, plan, mask)
        return without(state, kept), pack_on_device(output)

    @partial(jax.jit, donate_argnums=0)
    def controls(all_controls, packed):
        return adjust.fill(all_controls, unpack(packed, idle_controls(config)))

    return Functions(config, devices, prefill, speculative_step, controls)
