"""The token of mask rows: one that no text has."""

import re
from pathlib import Path

import numpy as np

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.text.tokenizer import Tokenizer

_RESERVED = re.compile(r"mask|reserved|unused|extra_id|placeholder|dummy", re.IGNORECASE)


def mask_token(
    given: int | None, folder: Path, config: TargetConfig, texts: list[np.ndarray]
) -> int:
    """`given`, or a reserved token, an id without a token, or a rare special one.

    Raises:
      ConfigError: `given` is no id of the target or occurs in the texts, or nothing can be chosen.
    """
    is_used = np.zeros(config.vocab_size, bool)
    for tokens in texts:
        is_used[np.unique(tokens)] = True
    if given is not None:
        if not 0 <= given < config.vocab_size:
            most = config.vocab_size - 1
            raise ConfigError(f"--mask-token-id {given}: the target's ids end at {most}")
        if is_used[given]:
            raise ConfigError(f"--mask-token-id {given}: the texts have this token; give another")
        return given
    for token in _candidates(folder, config):
        if 0 <= token < config.vocab_size and not is_used[token]:
            return token
    raise ConfigError(
        f"{folder}: its tokenizer has no reserved token; give --mask-token-id, "
        "a token that never occurs in text"
    )


def _candidates(folder: Path, config: TargetConfig) -> list[int]:
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer(folder)
    spelled = sorted(tokenizer.added.items(), key=lambda item: item[1])
    reserved = [
        (("mask" not in name.lower()), token) for name, token in spelled if _RESERVED.search(name)
    ]
    highest = max([tokenizer.vocab_size - 1, *tokenizer.added.values()])
    template, ends = tokenizer.template_source, {*config.eos_ids, config.bos_id}
    special = [
        token
        for name, token in reversed(spelled)
        if token in tokenizer.special_ids and token not in ends and name not in template
    ]
    return [
        *(token for _, token in sorted(reserved)),
        *range(highest + 1, config.vocab_size),
        *special,
    ]
