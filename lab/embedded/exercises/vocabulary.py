"""Words: names of parameters and variables, and words that examples are made of."""

NAMES = {
    "numbers": "numbers values nums xs items data integers arr lst",
    "words": "words strings items names tokens texts",
    "text": "text string s sentence line",
    "word": "word s term token text",
    "n": "n number num value",
    "x": "x n number value num item element v",
    "y": "y other b",
    "i": "i index idx pos position",
    "char": "char c ch letter symbol",
    "w": "word w item string token",
    "value": "value v amount count number",
    "result": "result output found collected res out kept",
    "total": "total result acc running amount",
    "count": "count total num counter found",
    "best": "best result top current_best chosen",
    "seen": "seen visited known already_seen",
    "counts": "counts frequencies tally occurrences",
    "groups": "groups grouped by_key buckets result",
    "limit": "limit threshold bound maximum cutoff",
    "size": "size n width length chunk_size",
    "k": "k n steps offset shift",
    "rest": "rest remaining left",
    "parts": "parts pieces fields chunks",
    "left": "left first a one",
    "right": "right second b other",
    "low": "low lo lower minimum start",
    "high": "high hi upper maximum end",
    "base": "base radix",
    "letters": "letters chars characters symbols",
}
"""Alternative names by placeholder; a placeholder that is not listed is its own name."""

PARTNERS = {"right": "left", "high": "low"}
"""Placeholders that take the name at the same place in the list as their partner did in its own."""

_WORDS = """
apple river stone cloud table window garden silver paper yellow mountain bread circle dog cat bird
level radar house train music winter summer orange purple banana cherry lemon grape melon kiwi tea
milk sugar salt pepper road bridge castle forest island ocean desert valley meadow lake door chair
lamp clock mirror pencil book noon letter number code python loop list tree leaf root branch seed
flower rain snow wind storm sun moon star sky blue green red white black small large quick slow
bright dark old new open cold warm sweet kind civic eye
"""
WORDS = tuple(_WORDS.split())
"""Ordinary words for examples."""
