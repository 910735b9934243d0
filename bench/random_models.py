"""Full-size models with random weights, and their engines: what `decode-step` and presets of `lossless` run."""

import dataclasses
import gc
import time
from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx

from bench.cells import CellsConfig, Variant, accept_rule, most_drafts
from bench.commands.decode_step import Options
from bench.presets import Preset
from bench.random_weights import random_head, random_target
from bench.synthetic import Scattered
from peagle_jax.devices import Devices
from peagle_jax.engine.engine import Engine
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter, make_drafter
from peagle_jax.method.verify import verify
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import order_weights


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights on the device, shared by all cells, and the seconds to generate them."""

    preset: Preset
    dtype: str
    target: Decoder
    heads: dict[str, DraftHead]
    seconds: float
    num_devices: int = 1
    has_shapes_only: bool = False

    @classmethod
    def make(
        cls, chosen: Preset, methods: list[str], *, dtype: str, seed: int, num_devices: int = 1
    ) -> "Models":
        start = time.perf_counter()
        devices = Devices(num_devices)
        rules = dict(dtype=dtype, devices=devices)
        target = random_target(chosen.target, chosen.format, seed=seed, **rules)
        drafting = [method for method in methods if method != "none"]
        heads = {m: random_head(chosen.head(m), seed=seed + 1, **rules) for m in drafting}
        jax.block_until_ready(jax.tree.leaves((target, heads)))
        return cls(
            preset=chosen,
            dtype=dtype,
            target=target,
            heads=heads,
            seconds=time.perf_counter() - start,
            num_devices=num_devices,
        )

    @classmethod
    def shapes(
        cls, chosen: Preset, methods: list[str], *, dtype: str, num_devices: int = 1
    ) -> "Models":
        """Models of shapes only, for engines that compile and never run."""
        placed = Devices(num_devices).placed
        target = nnx.eval_shape(lambda: random_target(chosen.target, chosen.format, dtype=dtype))
        head = lambda method: nnx.eval_shape(lambda: random_head(chosen.head(method), dtype=dtype))
        heads = {method: placed(head(method)) for method in methods if method != "none"}
        made = dict(preset=chosen, dtype=dtype, target=placed(target), heads=heads)
        return cls(**made, seconds=0.0, num_devices=num_devices, has_shapes_only=True)

    def drafter(self, method: str, num_draft: int, draft_sampling: str) -> Drafter:
        """The drafter of a head, which may be one of shapes."""
        make = partial(make_drafter, num_draft=num_draft, sampling=draft_sampling)
        head = self.heads[method]
        models = dict(head=head, target=self.target if self.num_devices == 1 else None)
        if not self.has_shapes_only:
            return make(**models)
        # `eval_shape` drops the shardings.
        return dataclasses.replace(jax.eval_shape(make, **models), head=head)

    def engine(self, options: Options, variant: Variant, concurrencies: tuple[int, ...]) -> Engine:
        """An engine for cells that differ in concurrency only, not yet warm.

        Raises:
          ConfigError: their caches do not fit beside the weights.
        """
        method, _, adaptive = variant
        num_draft, most = most_drafts(options, variant), max(concurrencies)
        tokens = options.prompt_tokens + options.max_tokens + 2 * num_draft + 1
        config = CellsConfig(
            concurrencies=concurrencies,
            num_draft=num_draft,
            adaptive=adaptive,
            draft_schedule=[(1, most, variant.num_draft)] if num_draft > variant.num_draft else (),
            max_num_seqs=most,
            max_model_len=-(-tokens // options.page_size) * options.page_size,
            page_size=options.page_size,
            prefill_chunk=options.prefill_chunk,
            prefill_rows=options.prefill_rows_of(most),
            small_prefills=options.small_prefills,
            draft_sampling=options.draft_sampling,
            dtype=self.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            tensor_parallel=self.num_devices,
            gather=options.gather,
            activations=options.activations,
            rounds_per_call=options.rounds_per_call,
            greedy_rounds=None if options.temperature == 0 else False,
            only_greedy=options.temperature == options.presence_penalty == 0 and adaptive == "off",
        )
        head, drafter, accept = self.heads.get(method), None, verify
        if head is not None:
            made = self.drafter(method, num_draft, options.draft_sampling)
            drafter = Scattered(made, self.preset.target.vocab_size, num_draft)
            accept = accept_rule(options, num_draft)
        order_weights(self.target, options.activations)
        return Engine(self.target, head, config, drafter=drafter, accept=accept)


_kept: dict[tuple, Models] | None = None


def keep_models() -> None:
    """From now on `models_of` keeps the last models that it made, for the next command of this process."""
    global _kept
    _kept = {}


def models_of(
    chosen: Preset, methods: list[str], *, dtype: str, seed: int, num_devices: int = 1
) -> Models:
    """`Models.make`, or the models that the command before made alike."""
    rules = dict(dtype=dtype, seed=seed, num_devices=num_devices)
    if _kept is None:
        return Models.make(chosen, methods, **rules)
    drafting = tuple(method for method in methods if method != "none")
    key = (chosen, drafting, *rules.values())
    if key not in _kept:
        _kept.clear()
        gc.collect()  # their memory
        _kept[key] = Models.make(chosen, methods, **rules)
    return _kept[key]
