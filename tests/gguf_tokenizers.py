"""Small tokenizers as GGUF metadata, trained on a few lines."""

import json
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LINES = [
    "The quick brown fox doesn't jump over 1234567 lazy dogs, I'LL say.",
    "def quicksort(xs):\n    return xs if len(xs) < 2 else [*small, *large]  # naïve Übung",
    "Tokens\r\n\r\n  of   many words; http://a.b/c?d=12&e=345 中文字符 Ñandú café",
]


@dataclass(frozen=True)
class Stored:
    """A tokenizer's metadata; the keys are those of `tokenizer.ggml.`."""

    model: str
    tokens: tuple[str, ...]
    token_type: tuple[int, ...]
    lists: dict = field(default_factory=dict)

    def metadata(self, **more) -> dict:
        lists = {name: list(values) for name, values in self.lists.items()}
        own = {
            "model": self.model,
            "tokens": list(self.tokens),
            "token_type": list(self.token_type),
        }
        return own | lists | more


@cache
def byte_level() -> Stored:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES * 3,
        trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False),
    )
    merges = [" ".join(pair) for pair in _model(tokenizer)["merges"]]
    tokens = (*_tokens(tokenizer), "<|im_start|>", "<|im_end|>", "<think>", "[PAD343]")
    kinds = (*[1] * (len(tokens) - 4), 3, 3, 4, 5)
    return Stored("gpt2", tokens, kinds, {"merges": merges})


def _spaced(model: str) -> Stored:
    """BPE over texts whose spaces are ▁, with tokens for bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        LINES * 3, trainers.BpeTrainer(vocab_size=140, show_progress=False)
    )
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    tokens = (*special, *(f"<0x{i:02X}>" for i in range(256)), *_tokens(tokenizer))
    kinds = (2, 3, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260))
    merges = [tuple(pair) for pair in _model(tokenizer)["merges"]]
    if model == "llama":
        ranks = {first + second: -float(i) for i, (first, second) in enumerate(merges)}
        scores = tuple(ranks.get(token, -1e6) for token in tokens)
        return Stored(model, tokens, kinds, {"scores": scores})
    return Stored(model, tokens, kinds, {"merges": tuple(map(" ".join, merges))})


def _model(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())["model"]


def _tokens(tokenizer: Tokenizer) -> list[str]:
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


SENTENCEPIECE, SPACED = _spaced("llama"), _spaced("gemma4")


def add_tokenizer(writer, stored: Stored, **more) -> None:
    """Adds the metadata to a `gguf.GGUFWriter`."""
    for key, value in stored.metadata(**more).items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
