"""Chats about code as prompts for `peagle-train head`: function heads of generated exercises and of
source files (`python -m lab.embedded chats`)."""

import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

from lab.embedded.corpus import collect
from lab.embedded.data import HEADER
from lab.embedded.exercises import exercises
from lab.embedded.functions import functions_of
from peagle_jax.training.synthesis import excluded_grams, is_allowed

_FORMS = (
    (6, "{head}\n"),
    (1, "Complete this Python function.\n\n```python\n{head}\n```"),
    (1, "Please write the body of this function:\n\n{head}"),
    (1, "```python\n{head}\n```\nImplement it and explain how it works."),
    (1, "Write unit tests for this function:\n\n{head}"),
)
"""Weight and text of a user's turn: mostly the bare head."""


def chats(folders: list[Path], count: int, exclude: tuple[Path, ...], seed: int) -> Iterator[str]:
    """At most `count` rows of `{"messages": ...}`, a half from exercises, without the words of
    `exclude`."""
    rng = random.Random(seed)
    documents, _ = collect(folders)
    documents.sort(key=lambda d: d.digest)
    found = functions_of([d.text for d in documents if not d.held_out])
    heads = [list(_heads(exercises(count // 2, seed))), list(_heads(dict.fromkeys(found)))]
    chosen = [head for some in heads for head in rng.sample(some, min(len(some), count // 2))]
    rng.shuffle(chosen)
    avoided = excluded_grams(exclude)
    weights, forms = zip(*_FORMS, strict=True)
    for head in chosen:
        text = rng.choices(forms, weights)[0].format(head=head)
        if is_allowed(text, avoided):
            yield json.dumps(dict(messages=[dict(role="user", content=text)]))


def _heads(texts) -> Iterator[str]:
    """Each function up to the end of its docstring, with the imports before it."""
    for text in texts:
        match = HEADER.search(text)
        if match:
            yield text[: match.start()] + textwrap.dedent(match.group(0))
