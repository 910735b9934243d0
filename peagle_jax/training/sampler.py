"""The engine in the form of tunix's samplers: `tunix.generate.base_sampler` of
google-tunix 0.1.7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from peagle_jax.engine.engine import Engine
from peagle_jax.errors import ConfigError
from peagle_jax.models import Decoder
from peagle_jax.sampling_params import SamplingParams

_LEFT_OUT = "beam_size", "return_logits", "echo", "eos_tokens"


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """Answers, those of one prompt one after the other; the fields of tunix's class."""

    text: list[str]
    logits: None  # the engine reports none
    tokens: list[np.ndarray] | np.ndarray  # int32 of each answer; padded [B, steps] if asked for
    padded_prompt_tokens: np.ndarray  # [B, P] int32, padded on the left
    logprobs: list[list[float]]  # of each token, of the model at temperature 1


class EngineSampler:
    """Calls an engine as a trainer of tunix calls its sampler; there are no beams and no logits.

    Args:
      engine: with a tokenizer.
      pad_id: token of padding.

    Raises:
      ConfigError: the engine has no tokenizer.
    """

    def __init__(self, engine: Engine, *, pad_id: int = 0):
        if engine.tokenizer is None:
            raise ConfigError("the engine has no tokenizer: give it one")
        self.engine, self.pad_id = engine, pad_id

    @property
    def transformer(self) -> Decoder:
        """The engine's target."""
        return self.engine.programs.models[0]

    @property
    def transformer_state(self) -> nnx.State:
        """Its parameters."""
        return nnx.state(self.transformer)

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        *,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        multi_sampling: int = 1,
        pad_output: bool = False,
        **others: object,
    ) -> SamplerOutput:
        """Generates `multi_sampling` answers of each text; answer i of the call has seed + i.

        Args:
          max_prompt_length: the width to which prompts are padded; None: that of the longest.
          others: beams, logits, echo and ends of text, which callers of tunix may leave empty, and
            `return_logprobs`, because log-probabilities always come.

        Raises:
          ConfigError: a prompt is longer, there is none, or one of `others` is asked for.
        """
        others.pop("return_logprobs", None)
        for name, value in others.items():
            if value or name not in _LEFT_OUT:
                raise ConfigError.of(name, "is not offered; leave it out")
        texts = [input_strings] if isinstance(input_strings, str) else input_strings
        if not texts or multi_sampling < 1:
            raise ConfigError("no answer is asked for: give prompts, and multi_sampling from 1 on")
        prompts = [self.tokenize(text) for text in texts for _ in range(multi_sampling)]
        width = max(map(len, prompts)) if max_prompt_length is None else max_prompt_length
        if max(map(len, prompts)) > width:
            raise ConfigError.of("max_prompt_length", f"{width} is less than a prompt has")
        params = [
            SamplingParams(
                max_tokens=max_generation_steps,
                temperature=temperature,
                top_p=1.0 if top_p is None else top_p,
                top_k=0 if top_k is None else top_k,
                seed=None if seed is None else seed + i,
                logprobs=0,
            )
            for i in range(len(prompts))
        ]
        done = self.engine.generate(prompts, params)
        tokens = [np.array(one.tokens, np.int32) for one in done]
        if pad_output:
            ends = [max_generation_steps - len(row) for row in tokens]
            tokens = np.stack(
                [self._padded(row, 0, end) for row, end in zip(tokens, ends, strict=True)]
            )
        rows = [np.array(prompt, np.int32) for prompt in prompts]
        return SamplerOutput(
            text=[one.text for one in done],
            logits=None,
            tokens=tokens,
            padded_prompt_tokens=np.stack([self._padded(row, width - len(row), 0) for row in rows]),
            logprobs=[[token.logprob for token in one.logprobs] for one in done],
        )

    def _padded(self, row: np.ndarray, before: int, after: int) -> np.ndarray:
        return np.pad(row, (before, after), constant_values=self.pad_id)

    def tokenize(self, input_string: str) -> list[int]:
        """Token ids of a prompt."""
        return self.engine.tokenizer.encode(input_string)

    def update_params(self, updated_weights: Any, filter_types: Any = None) -> None:
        """`Engine.update_weights` with all weights; `filter_types` is not needed.

        Raises:
          ConfigError: as `Engine.update_weights`.
        """
        self.engine.update_weights(updated_weights)

    def load_checkpoint(self, path_or_weights: str | Path | Any) -> None:
        """As `update_params`, also from a Hugging Face folder."""
        self.engine.update_weights(path_or_weights)
