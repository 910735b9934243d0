"""Target models. `build(config)` makes one; its forward returns hidden states and taps."""

from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.models.decoder import Decoder
from peagle_jax.models.experts import moe_layer
from peagle_jax.models.gemma4 import Gemma4Layer
from peagle_jax.models.layers import DecoderLayer

__all__ = ["Decoder", "build"]

_LAYERS = {
    "llama": DecoderLayer,
    "mistral": DecoderLayer,
    "qwen2": DecoderLayer,
    "qwen3": DecoderLayer,
    "qwen3_moe": moe_layer,
    "gpt_oss": moe_layer,
    "gemma4": Gemma4Layer,
}


def build(config: TargetConfig, *, dtype, rngs: nnx.Rngs) -> Decoder:
    """A randomly initialised target of `config.family`."""
    return Decoder(config, _LAYERS[config.family], dtype=dtype, rngs=rngs)
