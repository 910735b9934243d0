"""Tokenizers whose special tokens no text can spell."""

import json
import secrets
from collections.abc import Sequence


def without_spellings(tokenizer: str) -> str:
    """The content of a `tokenizer.json` whose special tokens have random spellings.

    A text that spells a special token is then split as any other text. Otherwise llguidance would
    force the special token where a grammar asks for its characters, and the output would lack them.
    """
    content, nonce = json.loads(tokenizer), secrets.token_hex(8)
    names = {
        one["content"]: f"{nonce}-{one['id']}" for one in content["added_tokens"] if one["special"]
    }
    for one in content["added_tokens"]:
        one["content"] = names.get(one["content"], one["content"])
    model = content["model"]
    renamed = lambda name: names.get(name, name)
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed(name): token for name, token in model["vocab"].items()}
    else:  # unigram: pairs of a name and its score
        model["vocab"] = [[renamed(name), score] for name, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = renamed(model["unk_token"])
    if "merges" in model:  # those with or into a special token have no entry any more
        model["merges"] = [one for one in model["merges"] if names.keys().isdisjoint(_parts(one))]
    return json.dumps(content)


def _parts(merge: str | Sequence[str]) -> tuple[str, ...]:
    """The parts of a merge of BPE, "a b" or ["a", "b"], and their union."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return (*parts, "".join(parts))
