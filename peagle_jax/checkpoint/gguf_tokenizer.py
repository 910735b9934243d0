"""The tokenizer in a GGUF file's metadata -> `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE (`gpt2`), SentencePiece with scores (`llama`) and Gemma 4's BPE with byte fallback
(`gemma4`). How a text is cut into words before BPE is not in the file but has a name, for which a
table has the rule.
"""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from peagle_jax.checkpoint.fields import Fields
from peagle_jax.checkpoint.gguf_config import CONTROL
from peagle_jax.checkpoint.gguf_file import GgufFile
from peagle_jax.word_patterns import GPT4O, LLAMA3, QWEN2, TEKKEN

_UNKNOWN, _USER_DEFINED, _UNUSED = 2, 4, 5
_SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
}
"""By `tokenizer.ggml.pre`: the pattern of words; None is GPT-2's."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""A word of the vocabulary is one token there, even if no merges lead to it."""


def read_tokenizer(file: GgufFile) -> tuple[str, dict] | None:
    """(content of tokenizer.json, tokenizer_config.json); None for a file without a tokenizer.

    Raises:
      CheckpointError: a kind of tokenizer that is not supported, or lists that are missing or
        damaged.
    """
    fields = Fields(
        {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.")
        },
        str(file.path),
    )
    kind = fields.text("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in _BUILDERS:
        raise file.error(
            f"tokenizer.ggml.model {kind!r} is not supported; {', '.join(_BUILDERS)} are"
        )
    tokens = _texts(fields, "tokens")
    if len(set(tokens)) < len(tokens):
        raise file.error("tokenizer.ggml.tokens names a token twice")
    types = fields.items("token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise file.error("tokenizer.ggml.token_type is not as long as tokens")
    vocab = {
        token: i
        for i, (token, one) in enumerate(zip(tokens, types, strict=True))
        if not (one == _UNUSED and token == f"[PAD{i}]")  # rows that pad the embedding
    }
    try:
        tokenizer = _BUILDERS[kind](file, fields, vocab)
    except Exception as error:  # the Rust side raises plain Exception
        raise file.error(f"tokenizer.ggml: {error}") from error
    added = [
        AddedToken(token, normalized=False, special=one != _USER_DEFINED)
        for token, one in zip(tokens, types, strict=True)
        if one in (_UNKNOWN, CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    settings = _settings(file, fields, tokens)
    _add_ends(tokenizer, fields, settings, kind)
    return tokenizer.to_str(pretty=False), settings


def _texts(fields: Fields, key: str) -> list[str]:
    found = fields.items(key)
    if not all(isinstance(one, str) for one in found):
        raise fields.error(f"tokenizer.ggml.{key} must be a list of texts")
    return found


def _settings(file: GgufFile, fields: Fields, tokens: list[str]) -> dict:
    """tokenizer_config.json: template and special tokens."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in names.items():
        token = fields.get(f"{theirs}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise file.error(f"tokenizer.ggml.{theirs}_token_id {token!r} is no token")
        settings[f"{ours}_token"] = tokens[token]
    if fields.get("tokenizer.chat_template") is not None:
        settings["chat_template"] = fields.text("tokenizer.chat_template")
    return settings


def _add_ends(tokenizer: Tokenizer, fields: Fields, settings: dict, kind: str) -> None:
    """BOS and EOS around a text. Without a flag llama.cpp puts BOS before SentencePiece and Llama
    3."""
    default = kind != "gpt2" or fields.get("pre") in ("llama-bpe", "llama3", "llama-v3")
    begin = [settings.get("bos_token")] if fields.flag("add_bos_token", default) else []
    end = [settings.get("eos_token")] if fields.flag("add_eos_token", False) else []
    special = [token for token in [*begin, *end] if token is not None]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*filter(None, begin), "$A", *filter(None, end)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(special)],
        )


def _byte_level(file: GgufFile, fields: Fields, vocab: dict[str, int]) -> Tokenizer:
    pre = fields.text("pre", "")
    if pre not in _SPLITS:
        raise ValueError(f"pre {pre!r} is not supported; {', '.join(_SPLITS)} are")
    model = models.BPE(vocab=vocab, merges=_merges(fields), ignore_merges=pre in _WHOLE_WORDS_FIRST)
    tokenizer, words = Tokenizer(model), _SPLITS[pre]
    stages = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)]
    if words is not None:
        stages.insert(0, pre_tokenizers.Split(Regex(words), behavior="isolated"))
    if pre == "smollm":
        stages.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    if words == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(fields: Fields) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in _texts(fields, "merges")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a merge is not of two tokens")
    return pairs


def _sentencepiece(file: GgufFile, fields: Fields, vocab: dict[str, int]) -> Tokenizer:
    """BPE whose merges are all pairs of tokens that make a token, the best score first."""
    scores = fields.items("scores")
    if len(scores) <= max(vocab.values(), default=-1):
        raise ValueError("scores is not as long as tokens")
    pairs = []
    for token, i in vocab.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs += [(-scores[i], pair) for pair in halves if pair[0] in vocab and pair[1] in vocab]
    pairs.sort(key=lambda one: one[0])
    tokenizer = _spaced(fields, vocab, [pair for _, pair in pairs])
    normal, decoding = [normalizers.Replace(" ", "▁")], []
    if fields.flag("add_space_prefix", True):
        normal.insert(0, normalizers.Prepend("▁"))
        decoding = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence([*_SPACED_DECODERS, *decoding])
    return tokenizer


def _gemma4(file: GgufFile, fields: Fields, vocab: dict[str, int]) -> Tokenizer:
    tokenizer = _spaced(fields, vocab, _merges(fields))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(_SPACED_DECODERS)
    return tokenizer


_SPACED_DECODERS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _spaced(fields: Fields, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    unknown = fields.get("unknown_token_id")
    names = {i: token for token, i in vocab.items()}
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=names.get(unknown), fuse_unk=True, byte_fallback=True
    )
    return Tokenizer(model)


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
"""By `tokenizer.ggml.model`."""
