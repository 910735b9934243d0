"""Places models and state on N devices, and turns a step for one device into a program for all of
them."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.peer_gather.mailbox import COUNTERS
from peagle_jax.config import ConfigError, DrafterConfig, EngineConfig, TargetConfig
from peagle_jax.method.step import State, StepOutput, init_state
from peagle_jax.models.cache import RingCache
from peagle_jax.models.layers import Attention
from peagle_jax.models.weight_order import arrange_weights
from peagle_jax.parallel import mailboxes, partition
from peagle_jax.parallel.mailboxes import Mailboxes, table_shape
from peagle_jax.parallel.partition import AXIS, Messages
from peagle_jax.parallel.replicas import checksums
from peagle_jax.parallel.shares import (
    Cut,
    Path,
    attention_at,
    cut_of,
    local_attention,
    share_of,
)
from peagle_jax.parallel.stacks import Stacks

_WHOLE = PartitionSpec()


def first_devices(count: int) -> list[jax.Device]:
    """The default device, or the first `count` devices of its platform.

    Raises:
      ConfigError: there are fewer.
    """
    default = dispatch.default_device()
    if count == 1:
        return [default]
    devices = jax.local_devices(backend=default.platform)
    if len(devices) < count:
        are = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)} of {default.platform}"
        rule = f"{count} devices are asked for, and {are}"
        raise ConfigError.of("tensor_parallel", rule)
    return devices[:count]


class Devices:
    """The first N devices.

    Args:
      count: N; 1 leaves everything as it is on the default device.
      check_replicas: whether the programs report checksums of what all devices hold alike.
      peers: whether kernels that store into the memory of other devices gather small arrays; else
        collectives do. None: where nothing speaks against it (`mailboxes.refusal_by_default`).
      mesh: devices to use instead, along `AXIS`: those of a topology, to compile for absent ones.

    Raises:
      ConfigError: there are too few devices, or they cannot access each other's memory and `peers`
        is set.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        check_replicas: bool = False,
        peers: bool | None = False,
        mesh: Mesh | None = None,
    ):
        self.count = count
        self.check_replicas = check_replicas and count > 1
        self.mesh = mesh
        self.peers = bool(peers) and count > 1
        if mesh is not None or count == 1:
            return
        self.mesh = Mesh(np.array(first_devices(count)), (AXIS,))
        if peers is None:
            why = mailboxes.refusal_by_default(self.mesh.devices)
            self.peers = why is None
            logging.getLogger(__name__).info(
                "%d devices exchange small arrays by %s",
                count,
                "kernels that store into their peers" if why is None else f"the library: {why}",
            )
        if self.peers:
            self._mailboxes = Mailboxes(self.mesh.devices)

    @classmethod
    def of(cls, config: EngineConfig) -> "Devices":
        """Those that an engine of this configuration runs on; raises as the class does."""
        peers = None if config.gather == "auto" else config.gather == "peers"
        return cls(config.tensor_parallel, check_replicas=config.check_replicas, peers=peers)

    def sharding(self, spec: PartitionSpec = _WHOLE) -> NamedSharding:
        """The sharding of arrays that are cut as `spec` says; without one: a copy on every
        device."""
        return NamedSharding(self.mesh, spec)

    def copied(self, tree):
        """The tree with a copy of every array on each device; arrays that lie on all of them
        stay."""
        return tree if self.mesh is None else jax.tree.map(self._copied, tree)

    def _copied(self, leaf):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=self.sharding())
        return jax.device_put(leaf, self.sharding())

    def placed(self, model: nnx.Module | None) -> nnx.Module | None:
        """The model with each device's share on that device, which may be the model itself.

        Raises:
          ConfigError: a share would cut a block of a quantised weight.
        """
        if self.mesh is None or model is None:
            return model
        leaves, structure = jax.tree.flatten(model)
        copy = jax.tree.unflatten(structure, leaves)
        mesh_of = lambda leaf: getattr(getattr(leaf, "sharding", None), "mesh", None)
        if any(mesh_of(leaf) != self.mesh for leaf in leaves):
            arrange_weights(copy, in_tiles=False)  # what follows cuts rows and columns
        shared = local_modules(copy, model.config, self.count)
        params = dict(nnx.to_flat_state(nnx.state(shared)))
        for path, param in params.items():
            value = param.get_value()
            if mesh_of(value) != self.mesh:
                weight = params.get((*path[:-1], "weight"), param) if path[-1] == "scale" else param
                cut = self.cut_of(model.config, path, value.shape, weight.shape)
                param.set_value(self.put(value, cut))
        return shared

    def cut_of(self, config: TargetConfig | DrafterConfig, path: Path, shape, weight_shape):
        """`shares.cut_of` for these devices; None on one device."""
        if self.mesh is None:
            return None
        return cut_of(config, path, shape, weight_shape, self.count)

    def put(self, array, cut: Cut | None) -> jax.Array:
        """A global array from a numpy or jax array: every device gets its share only.

        From the shape of an array it makes the shape of the global one.
        """
        if self.mesh is None:
            return jnp.asarray(array)
        if cut is None:
            return self._copied(array)
        return self.assembled(
            array.shape,
            array.dtype,
            cut,
            None
            if isinstance(array, jax.ShapeDtypeStruct)
            else lambda rank: share_of(array, cut, rank, self.count),
        )

    def assembled(self, shape, dtype, cut: Cut, share: Callable[[int], np.ndarray] | None):
        """The global array of an array [shape] that is cut, from `share(rank)` of each device.

        None in its place makes its shape only.
        """
        wide = list(shape)
        wide[cut.axis] = self.count * cut.width(self.count)
        sharding = self.sharding(PartitionSpec(*[None] * cut.axis, AXIS))
        if share is None:
            return jax.ShapeDtypeStruct(tuple(wide), dtype, sharding=sharding)
        shares = [
            jax.device_put(share(rank), device) for rank, device in enumerate(self.mesh.devices)
        ]
        return jax.make_array_from_single_device_arrays(tuple(wide), sharding, shares)

    def init_state(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        config: EngineConfig,
        links: jax.Array | None = None,
    ) -> State:
        """`step.init_state`, made where it stays: no device ever holds the caches of all.

        Args:
          links: of the state before, if there was one: messages are counted from the first on.
        """
        make = functools.partial(init_state, target, drafter, config)
        if self.mesh is None:
            return make()
        state = jax.jit(make, out_shardings=self.state_shardings(jax.eval_shape(make)))()
        if not self.peers:
            return state
        return replace(state, links=self.links() if links is None else links)

    def links(self) -> jax.Array:
        """int32 [n, LINKS], the tables of devices that have sent no message; to be called once,
        with `peers`."""
        at, shape = self.sharding(PartitionSpec(AXIS)), table_shape(self.count).shape
        return jax.make_array_from_single_device_arrays(shape, at, self._mailboxes.tables())

    def state_shape(
        self, target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig
    ) -> State:
        """The shapes of `init_state`, with its shardings."""
        state = jax.eval_shape(functools.partial(init_state, target, drafter, config))
        if self.mesh is None:
            return state
        state = replace(state, links=table_shape(self.count) if self.peers else None)
        return jax.tree.map(lambda x, at: x.update(sharding=at), state, self.state_shardings(state))

    def state_shardings(self, state: State) -> State:
        """The shardings of a state, of which only the structure is read."""
        return jax.tree.map(self.sharding, state_specs(state))

    def program(self, f: Callable) -> Callable:
        """`f` on all devices: on one device `f` itself.

        Args:
          f: function of (weights, state, plan, mask, previous, *more, **static) that returns the
            next state and an output, for the arrays of one device. `weights` are what
            `take_weights` returned, or one device's shares of it: see `leaves`. `state` may lack
            parts of a `State`. With `check_replicas` the output is packed, int32 [n].
        """
        if self.mesh is None:
            return f

        @functools.wraps(f)
        def program(weights, state, plan, mask, previous, *more, **static):
            inputs, states = _Leaves((plan, mask, more)), _Leaves(state)
            specs = states.filled(jax.tree.leaves(state_specs(state)))
            outputs = []

            def local(weights, state, given):
                plan, mask, more = inputs.tree(given)
                state = states.tree(state)
                messages = None if state.links is None else Messages(met(state.links[0]))
                with partition.over(self.count, messages):
                    state, output = f(weights, state, plan, mask, None, *more, **static)
                if messages is not None:
                    state = replace(state, links=messages.links[None])
                if self.check_replicas:
                    sums = checksums((_copies(state), output))
                    output = jnp.concatenate([output, lax.bitcast_convert_type(sums, jnp.int32)])
                outputs.append(_Leaves(output))
                return states.filled(jax.tree.leaves(state)), outputs[0].filled()

            state, output = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(self._weight_specs, specs, _WHOLE),
                out_specs=(specs, _WHOLE),
                check_vma=False,  # gathered sums are equal on all devices, which jax cannot see
            )(weights, states.filled(), inputs.filled())
            return states.tree(state), outputs[0].tree(output)

        return program

    def reported(self, output: StepOutput) -> StepOutput:
        """The shapes of an output of `program`, given those of the step's."""
        if not self.check_replicas:
            return output
        return replace(output, replicas=jax.ShapeDtypeStruct((self.count,), jnp.uint32))

    def take_weights(self, weights: list) -> list:
        """The operands of programs for these weights: on several devices many weights are stacked,
        and arrays that are not placed yet are copied to all devices."""
        weights = self.copied(weights)
        if self.mesh is not None:
            self._stacks = Stacks(weights)
            weights = self._stacks.operands(weights)
            self._weight_specs = [leaf.sharding.spec for leaf in weights]
        return weights

    def replace_weights(self, operands: list, take: list[Callable | None]) -> None:
        """Replaces operands of programs one by one, so that no two models are in memory at once.

        Args:
          operands: what `take_weights` returned; changed in place.
          take: for each weight a function of the one before, which returns the one that takes its
            place, of the same shape and sharding; None: it stays.
        """
        alone = range(len(take)) if self.mesh is None else self._stacks.alone
        for place, i in enumerate(alone):
            if take[i] is not None:
                operands[place] = take[i](operands[place])
        if self.mesh is not None:
            self._stacks.replace(operands, take)

    def leaves(self, weights: list) -> list:
        """The weights, or one device's shares of them, from the operands of a program.

        A loop calls this in its body: XLA would copy a slice that is made outside of it.
        """
        return weights if self.mesh is None else self._stacks.leaves(weights)


ONE_DEVICE = Devices()
"""The default device."""


class _Leaves:
    """Leaves of a tree without its empty arrays, [S, 0] drafts of K = 0: XLA crashes on the CPU if
    such an array is an operand of a program for several devices."""

    def __init__(self, tree):
        self._leaves, self._structure = jax.tree.flatten(tree)
        self._is_filled = [leaf.size > 0 for leaf in self._leaves]

    def filled(self, leaves: list | None = None) -> list:
        """Those of `leaves`, which stand for the tree's own, that are not empty in the tree."""
        leaves = self._leaves if leaves is None else leaves
        return [leaf for leaf, kept in zip(leaves, self._is_filled, strict=True) if kept]

    def tree(self, filled: list):
        """The tree with other arrays in place of those that `filled` returns."""
        left = iter(filled)
        empty = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)
        pairs = zip(self._leaves, self._is_filled, strict=True)
        leaves = [next(left) if kept else empty(leaf) for leaf, kept in pairs]
        return jax.tree.unflatten(self._structure, leaves)


def met(links: jax.Array) -> jax.Array:
    """A device's table, after all devices have begun the program.

    Hazard: XLA lets the threads of the devices wait for each other, after they have loaded kernels
    and made CUDA graphs, only if the program has a collective. Without one a kernel of one device
    might wait for a message while the thread of another is in a call of the driver that waits for
    that kernel. Therefore a number that is equal on all devices is gathered.
    """
    return links.at[COUNTERS].set(lax.all_gather(links[COUNTERS], AXIS).max())


def local_modules(model: nnx.Module, config: TargetConfig | DrafterConfig, count: int):
    """`model`, changed such that its attention blocks have the heads of one device.

    Args:
      config: the model's own, whose heads are those of all devices.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Attention):
            module.config = local_attention(attention_at(config, path), count)
    return model


def _copies(state: State) -> State:
    """The state without what differs between the devices."""
    links = None if state.links is None else state.links[:, COUNTERS:]
    return replace(state, target_cache=[], drafter_cache=[], draft_probs=None, links=links)


def state_specs(state: State) -> State:
    """Partition specs of `step.State`: caches by heads, draft probabilities by vocabulary, the rest
    whole."""
    specs = jax.tree.map(lambda _: _WHOLE, state)

    def cache(layer):
        axes = [None] * (3 if isinstance(layer, RingCache) else 2)
        return type(layer)(*[PartitionSpec(*axes, AXIS)] * 2)

    return replace(
        specs,
        target_cache=[cache(layer) for layer in state.target_cache],
        drafter_cache=[cache(layer) for layer in state.drafter_cache],
        draft_probs=None if state.draft_probs is None else PartitionSpec(None, None, AXIS),
        links=None if state.links is None else PartitionSpec(AXIS),
    )
