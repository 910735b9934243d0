"""All templates, by theme."""

from peagle_jax.training.exercises import (
    arithmetic,
    characters,
    combining,
    dictionaries,
    digits,
    number_keys,
    number_lists,
    parsing,
    recursions,
    searching,
    strings,
    tables,
    word_lists,
)

_THEMES = (
    arithmetic,
    characters,
    combining,
    dictionaries,
    digits,
    number_keys,
    number_lists,
    parsing,
    recursions,
    searching,
    strings,
    tables,
    word_lists,
)
TEMPLATES = [template for theme in _THEMES for template in theme.TEMPLATES]
