"""A vocabulary of 128 tokens for texts in JSON, the size of the tiny models."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny

END, BEGIN_THINK, END_THINK = "<|end|>", "<think>", "</think>"
_CONFIG = '{"chat_template": "{% for m in messages %}{{ m.content }}\\n{% endfor %}"}'


def json_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE: ASCII, pairs of punctuation and letters, an end, marks of reasoning."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    pairs = [(a, b) for a in '{[",' for b in '"abn1[{'] + [("a", "b")]
    tokens = [*letters, *(a + b for a, b in pairs)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    # As in Qwen3 they are added tokens, and not special.
    backend.add_tokens([AddedToken(name, normalized=False) for name in (BEGIN_THINK, END_THINK)])
    assert backend.get_vocab_size() == tiny.TARGET.vocab_size
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(_CONFIG)
    return Tokenizer(folder)
