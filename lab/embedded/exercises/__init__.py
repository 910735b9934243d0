"""Generated exercises: small Python functions with a docstring, as training text.

A new template goes into the TEMPLATES of the file with its theme (`strings`, `arithmetic`, ...);
`template` explains its parts.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from random import Random

from lab.embedded.exercises import arithmetic, number_keys, number_lists, strings
from lab.embedded.exercises.making import document
from peagle_jax.errors import ConfigError

TEMPLATES = [
    *arithmetic.TEMPLATES,
    *number_keys.TEMPLATES,
    *number_lists.TEMPLATES,
    *strings.TEMPLATES,
]
_BLOCK = 250
"""Documents that are drawn from one seed of their own."""
_MANY = 5_000
"""Documents for which starting processes pays off."""
_MIN_NEW = 0.1
"""Share of a wave's documents that must be new; below it the templates are exhausted."""


def _block(seed: int, index: int) -> list[str]:
    """Block `index` of the documents of a seed; it may repeat documents."""
    rng = Random(f"exercises {seed} {index}")
    chosen = rng.choices(TEMPLATES, [t.weight for t in TEMPLATES], k=_BLOCK)
    return [document(template, rng) for template in chosen]


def _blocks(seed: int, indices: range) -> Iterator[list[str]]:
    """Blocks in their order; many of them come from one process per core."""
    if len(indices) * _BLOCK < _MANY:
        yield from map(partial(_block, seed), indices)
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_block, seed), indices, chunksize=4)


def exercises(count: int, seed: int) -> list[str]:
    """Makes `count` different documents, each one function that ends with a newline.

    The same seed gives the same documents on every machine, and fewer documents are the first ones
    of more.

    Raises:
      ConfigError: the templates do not give that many different documents.
    """
    found: dict[str, None] = {}
    begin = 0
    while len(found) < count:
        before = len(found)
        indices = range(begin, begin + (count - before) // _BLOCK + 1)
        for documents in _blocks(seed, indices):
            found.update(dict.fromkeys(documents))
        if len(found) - before < _MIN_NEW * _BLOCK * len(indices):
            raise ConfigError(
                f"{count} exercises: the templates give about {len(found)} different ones; "
                "ask for fewer"
            )
        begin = indices.stop
    return list(found)[:count]
