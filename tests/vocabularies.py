"""Tokenizers of tests: byte-level BPE with a few merges; 128 tokens are the size of tiny models."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny

END, BEGIN_THINK, END_THINK = "<|end|>", "<think>", "</think>"
_ASCII = [*map(chr, range(33, 127)), "Ġ", "Ċ"]


def byte_level(
    folder: Path,
    letters: Sequence[str],
    pairs: Sequence[tuple[str, str]] = (),
    *,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    **settings,
) -> Tokenizer:
    """Letters, pairs of them that are one token, special tokens, and added tokens that are text."""
    tokens = [*letters, *(a + b for a, b in pairs)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, [*pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in special])
    backend.add_tokens([AddedToken(one, normalized=False) for one in added])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def letter_tokenizer(folder: Path) -> Tokenizer:
    """128 tokens: printable ASCII and pairs of letters; chats are lines."""
    pairs = [(a, b) for a in "abcdef" for b in "ghijkl"][: tiny.TARGET.vocab_size - len(_ASCII)]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    return byte_level(folder, _ASCII, pairs, chat_template=template)


def json_tokenizer(folder: Path) -> Tokenizer:
    """128 tokens for texts in JSON: ASCII, pairs of punctuation and letters, an end, marks of
    reasoning, which in Qwen3 are not special either."""
    pairs = [(a, b) for a in '{[",' for b in '"abn1[{'] + [("a", "b")]
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    added = dict(special=[END], added=[BEGIN_THINK, END_THINK], chat_template=template)
    made = byte_level(folder, _ASCII, pairs, **added)
    assert made.vocab_size == tiny.TARGET.vocab_size
    return made
