"""`load`: builds an engine from model folders, by default from the embedded model."""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.checkpoint import Quantization, load_head, load_target
from peagle_jax.checkpoint.gguf_file import is_gguf
from peagle_jax.cli.model_folders import check_method, embedded, head_of, local_folder
from peagle_jax.config import ConfigError, EngineConfig, Method
from peagle_jax.devices import Devices
from peagle_jax.engine.engine import Engine
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.own_drafters import is_own, load_own
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import order_weights, tile_columns
from peagle_jax.text.tokenizer import Tokenizer


def load_weights(
    model: str | Path | None,
    drafter: str | Path | None,
    *,
    method: Method | None,
    dtype: str,
    quantization: Quantization | None = None,
    taps: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    activations: str = "bf16",
    lora: str | Path | None = None,
) -> tuple[Decoder, DraftHead | None, Tokenizer | None]:
    """Target, head and tokenizer.

    Args:
      model: Hugging Face folder, or a GGUF file; None is the embedded model.
      drafter: head folder; None is the head of `method` that ships for the target. `module:Class`
        has no head: `own_drafters.load_own` loads it.
      method: "none" loads no head; another must be the head's own method; None takes
        the head's method (for the embedded model "peagle").
      dtype: dtype of all weights that are not quantised.
      quantization: "fp8" quantises the target's matrices during loading.
      taps: tap ids that override those of the head's config.json.
      tensor_parallel: number of devices that share the model (docs/parallel.md).
      activations: as in `EngineConfig`.
      lora: folder of an adapter of peft, merged into the target before it is quantised.

    Raises:
      ConfigError: a file is missing, or head and target do not match.
    """
    check_method(model, drafter, method)
    target_folder = embedded("target") if model is None else Path(model)
    if is_gguf(target_folder):
        target_folder = local_folder(target_folder)
    devices = Devices(tensor_parallel)
    target = load_target(
        target_folder, dtype=dtype, quantization=quantization, devices=devices, lora=lora
    )
    order_weights(target, activations)
    has_text = (target_folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer(target_folder) if has_text else None
    if method == "none" or is_own(drafter):
        return target, None, tokenizer
    if drafter is None:
        is_embedded = model is None
        drafter = embedded(method or "peagle") if is_embedded else head_of(target_folder, method)
    head = load_head(drafter, target.config, dtype=dtype, taps=taps, devices=devices)
    if method not in (None, head.config.method):
        raise ConfigError(
            f"{drafter} is a {head.config.method} head; run it with --method {head.config.method}"
        )
    return target, head, tokenizer


def load(
    model: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    method: Method | None = None,
    config: EngineConfig | None = None,
    quantization: Quantization | None = None,
    taps: Sequence[int] | None = None,
    lora: str | Path | None = None,
) -> Engine:
    """An engine from Hugging Face folders; without arguments the embedded model with P-EAGLE.

    Arguments are those of `load_weights`; `config` sizes the engine. `drafter` may be
    `module:Class`, a drafter of the user's own (`own_drafters`), whose taps `taps` replaces.

    >>> engine = load()
    >>> engine.generate(["def quicksort(xs):"], SamplingParams(max_tokens=64))[0].text
    """
    config = config or EngineConfig()
    target, head, tokenizer = load_weights(
        model,
        drafter,
        method=method,
        dtype=config.dtype,
        quantization=quantization,
        taps=taps,
        tensor_parallel=config.tensor_parallel,
        activations=config.activations,
        lora=lora,
    )
    tile_columns(target, head)
    own = load_own(drafter, target, config)
    parts = {} if own is None else dict(drafter=own, taps=taps)
    return Engine(target, head, config, tokenizer=tokenizer, **parts)
