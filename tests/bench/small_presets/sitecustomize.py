"""Makes every preset tiny in each Python process that has this folder in PYTHONPATH."""

from dataclasses import replace

from bench import presets
from peagle_jax.config import ExpertsConfig

_SIZES = dict(vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2)
_SIZES |= dict(head_dim=128, intermediate_size=512, eos_ids=(1,), bos_id=None)

for _name, _config in presets.PRESETS.items():
    _experts = None if _config.experts is None else ExpertsConfig(num_experts=8, top_k=2)
    _windows = None if _config.sliding_windows is None else _config.sliding_windows[:2]
    presets.PRESETS[_name] = replace(_config, **_SIZES, experts=_experts, sliding_windows=_windows)
presets._SHAPES.clear()
presets._MASK_IDS.clear()
presets.PEAGLE_LAYERS = 1
