"""A target and its heads: those of a folder, or of a full-size model with random weights."""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from bench.cells import PLAIN, Variant
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
    """

    name: str
    dtype: str
    weights: str
    target: Decoder
    heads: dict[str, DraftHead]
    tokenizer: Tokenizer | None = None
    activations: str = "bf16"
    is_random: bool = False
    num_devices: int = 1

    @classmethod
    def load(cls, options: ModelOptions, tensor_parallel: int = 1) -> "Models":
        """From the options' model, heads, formats and methods."""
        dtype = runs.choose_dtype(options.dtype)
        target, heads, tokenizer = runs.load_methods(
            options.model,
            options.drafter,
            dtype=dtype,
            activations=options.activations,
            tensor_parallel=tensor_parallel,
            methods=options.methods,
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
    ) -> "Models":
        """Random weights on the device."""
        devices = Devices(num_devices)
        target = random_target(
            chosen.target, chosen.format, dtype=dtype, seed=seed, devices=devices
        )
        heads = {
            method: random_head(chosen.head(method), dtype=dtype, seed=seed + 1, devices=devices)
            for method in methods
            if method != "none"
        }
        jax.block_until_ready(jax.tree.leaves((target, heads)))
        return cls(
            name=chosen.name,
            dtype=dtype,
            weights=chosen.weights,
            target=target,
            heads=heads,
            is_random=True,
            num_devices=num_devices,
        )

    def drafter(
        self, method: str, num_draft: int, sampling: str = EngineConfig.draft_sampling
    ) -> Drafter:
        """The drafter of a head."""
        target = self.target if self.num_devices == 1 else None
        return make_drafter(self.heads[method], num_draft, sampling, target=target)

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

    def variants(self, options: ModelOptions) -> list[Variant]:
        """What to measure; plain decoding, if asked for, is first."""
        adaptive = getattr(options, "adaptive", ("off",))
        plain = [PLAIN] if "none" in options.methods else []
        return plain + [Variant(*one) for one in itertools.product(self.heads, options.k, adaptive)]

    def identity(
        self, options: SweepOptions, *, prompts: str, variant: Variant, concurrency: int
    ) -> dict:
        """Row fields that identify the measurement."""
        chat = {"chat": True} if hasattr(options, "chat") and self.uses_chat(options) else {}
        return chat | {
            "model": self.name,
            "dtype": self.dtype,
            "weights": self.weights,
            "activations": self.activations,
            "set": prompts,
            "method": variant.method,
            "num_speculative_tokens": variant.num_draft,
            "concurrency": concurrency,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "draft_sampling": "argmax" if variant.method == "none" else options.draft_sampling,
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
        return Engine(self.target, self.heads.get(method), config, tokenizer=self.tokenizer)


_kept: dict[tuple, Models] = {}


def random_models(
    chosen: Preset, methods: Sequence[str], *, dtype: str, num_devices: int = 1
) -> Models:
    """`Models.random`, or the models that the command before made alike."""
    drafting = tuple(method for method in methods if method != "none")
    key = (chosen, drafting, dtype, num_devices)
    if key not in _kept:
        _kept.clear()
        gc.collect()  # their memory
        _kept[key] = Models.random(chosen, methods, dtype=dtype, num_devices=num_devices)
    return _kept[key]
