"""Patterns by which tokenizers of released models cut a text into words before BPE.

Each reads a text once. A pattern of an unknown author may search it for any time.
"""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _cased(ending: str, digits: str) -> str:
    """Words by letter case, as GPT-4o cuts them."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return f"{words}|{digits}|{_SLASHED_TAIL}"


LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
EMBEDDED = (
    r"(?:\r?\n[ \t]*)+| ?__\p{L}+__|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+"
)
RELEASED = frozenset((LLAMA3, QWEN2, GPT4O, TEKKEN, EMBEDDED))


def patterns_of(part: object) -> frozenset[str]:
    """All regular expressions within a part of a `tokenizer.json`."""
    if isinstance(part, list):
        return frozenset().union(*map(patterns_of, part))
    if not isinstance(part, dict):
        return frozenset()
    own = part.get("Regex")
    return patterns_of(list(part.values())) | ({own} if isinstance(own, str) else frozenset())
