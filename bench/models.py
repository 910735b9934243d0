"""A target and its heads: those of a folder, or of a full-size model with random weights."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
from flax import nnx

from bench.command import ModelOptions, SweepOptions
from bench.presets import Preset
from bench.random_weights import random_head, random_target
from pallas_kernels.formats import kind
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.engine import Engine
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter, make_drafter
from peagle_jax.models import Decoder
from peagle_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target, its heads by method, and their name in rows.

    Attributes:
      weights: format of the target's matrices in rows: a dtype, fp8 (in rows or tiles) or mxfp4.
      seconds: taken to generate random weights.
    """

    name: str
    dtype: str
    weights: str
    target: Decoder
    heads: dict[str, DraftHead]
    tokenizer: Tokenizer | None = None
    activations: str = "bf16"
    is_random: bool = False
    seconds: float = 0.0
    num_devices: int = 1
    has_shapes_only: bool = False

    @classmethod
    def load(cls, options: ModelOptions) -> "Models":
        """From the options' model, heads, formats and methods."""
        dtype = runs.choose_dtype(options.dtype)
        target, heads, tokenizer = runs.load_methods(
            options.model,
            options.drafter,
            dtype=dtype,
            quantization=options.quantization,
            activations=options.activations,
        )
        folder = "" if options.model is None else Path(options.model).resolve().name
        matrix, weights = target.layers[0].mlp.down, dtype
        if matrix.scale is not None:
            weights = kind(matrix.weight[...], matrix.scale[...]).removesuffix("_tiles")
        return cls(
            name=options.model_name or folder or "embedded",
            dtype=dtype,
            weights=weights,
            target=target,
            heads={method: head for method, head in heads.items() if method in options.methods},
            tokenizer=tokenizer,
            activations=options.activations,
        )

    @classmethod
    def random(
        cls,
        chosen: Preset,
        methods: Sequence[str],
        *,
        dtype: str,
        seed: int = 0,
        num_devices: int = 1,
        has_shapes_only: bool = False,
    ) -> "Models":
        """Random weights on the device; or shapes, for engines that compile and never run."""
        start, devices = time.perf_counter(), Devices(num_devices)

        def make(function, config, **how):
            if not has_shapes_only:
                return function(config, dtype=dtype, devices=devices, **how)
            return devices.placed(nnx.eval_shape(lambda: function(config, dtype=dtype, **how)))

        target = make(partial(random_target, form=chosen.format), chosen.target, seed=seed)
        heads = {
            method: make(random_head, chosen.head(method), seed=seed + 1)
            for method in methods
            if method != "none"
        }
        if not has_shapes_only:
            jax.block_until_ready(jax.tree.leaves((target, heads)))
        return cls(
            name=chosen.name,
            dtype=dtype,
            weights=chosen.weights,
            target=target,
            heads=heads,
            is_random=True,
            seconds=time.perf_counter() - start,
            num_devices=num_devices,
            has_shapes_only=has_shapes_only,
        )

    def shapes(self) -> "Models":
        """The same models with shapes for weights."""
        shaped = partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        heads = {method: shaped(head) for method, head in self.heads.items()}
        return replace(self, target=shaped(self.target), heads=heads, has_shapes_only=True)

    def drafter(
        self, method: str, num_draft: int, sampling: str = "argmax", *, selector: bool = True
    ) -> Drafter:
        """The drafter of a head, which may be one of shapes."""
        make = partial(make_drafter, num_draft=num_draft, sampling=sampling, selector=selector)
        head = self.heads[method]
        target = self.target if self.num_devices == 1 else None
        if not self.has_shapes_only:
            return make(head=head, target=target)
        # `eval_shape` drops the shardings.
        return replace(jax.eval_shape(make, head=head, target=target), head=head)

    def uses_chat(self, options: SweepOptions) -> bool:
        """Whether prompts go through the chat template: as `--chat` says, else where a model of the
        user has one.

        Raises:
          ConfigError: `--chat` is given, and the model has no template.
        """
        has_template = self.tokenizer is not None and bool(self.tokenizer.template_source)
        if options.chat and not has_template:
            raise ConfigError("--chat: this model has no chat template")
        return options.model is not None and has_template if options.chat is None else options.chat

    def variants(self, options: ModelOptions) -> list[tuple[str, int]]:
        """(method, K) to measure; plain decoding, if asked for, is first."""
        plain = [("none", 0)] if "none" in options.methods else []
        return plain + [(method, k) for method in self.heads for k in options.k]

    def identity(
        self, options: SweepOptions, *, prompts: str, variant: tuple[str, int], concurrency: int
    ) -> dict:
        """Row fields that identify the measurement."""
        method, num_draft = variant
        chat = {"chat": True} if hasattr(options, "chat") and self.uses_chat(options) else {}
        return chat | {
            "model": self.name,
            "dtype": self.dtype,
            "weights": self.weights,
            "activations": self.activations,
            "set": prompts,
            "method": method,
            "num_speculative_tokens": num_draft,
            "concurrency": concurrency,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }

    def engine(self, method: str, num_draft: int, config: EngineConfig) -> Engine:
        # Prompts repeat from run to run; cached ones would be measured without their prefill.
        config = replace(
            config,
            num_draft=num_draft,
            dtype=self.dtype,
            activations=self.activations,
            prefix_caching=False,
        )
        head, drafter = self.heads.get(method), None
        if head is not None and self.has_shapes_only:
            sampling = config.draft_sampling
            drafter = self.drafter(method, num_draft, sampling, selector=config.selector)
        return Engine(self.target, head, config, tokenizer=self.tokenizer, drafter=drafter)


_kept: dict[tuple, Models] | None = None


def keep_models() -> None:
    """From now on `random_models` keeps the last models, for the next command of this process."""
    global _kept
    _kept = {}


def random_models(
    chosen: Preset, methods: Sequence[str], *, dtype: str, seed: int, num_devices: int = 1
) -> Models:
    """`Models.random`, or the models that the command before made alike."""
    make = partial(Models.random, chosen, methods, dtype=dtype, seed=seed, num_devices=num_devices)
    if _kept is None:
        return make()
    drafting = tuple(method for method in methods if method != "none")
    key = (chosen, drafting, dtype, seed, num_devices)
    if key not in _kept:
        _kept.clear()
        gc.collect()  # their memory
        _kept[key] = make()
    return _kept[key]
