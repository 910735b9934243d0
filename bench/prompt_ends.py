"""`peagle-bench prompt-ends`: how often a model ends the text at once, by where the prompt was cut."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import rows
from bench.commands.prompt_ends import ENDS, Options
from bench.sweep import Models, engines, sampling
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.structured import Structured
from peagle_jax.text.prompts import read_text
from peagle_jax.text.tokenizer import Tokenizer

_LEAST = 200
"""Characters before a cut, so that a prompt is never the head of a file alone."""


def cut(text: str, end: str, count: int, characters: int, rng: random.Random) -> list[str]:
    """Prompts of at most `characters`, cut after a random match of the pattern of `end`, each place once."""
    places = [match.end() for match in re.compile(ENDS[end]).finditer(text)]
    places = [place for place in places if place >= _LEAST]
    chosen = rng.sample(places, min(count, len(places)))
    return [text[max(0, place - characters) : place] for place in chosen]


def cuts(texts: Sequence[str], end: str, count: int, characters: int, seed: int) -> list[str]:
    """`count` prompts, as equally as possible from all texts."""
    rng, found = random.Random(f"{seed} {end}"), []
    for number, text in enumerate(texts):
        share = (count - len(found)) // (len(texts) - number)
        found += cut(text, end, share, characters, rng)
    return found


def healed(tokenizer: Tokenizer, text: str) -> tuple[list[int], str]:
    """The prompt without its last token, and the text of that token.

    The token stays where its text is no whole character, or where it is the only one.
    """
    tokens = tokenizer.encode(text)
    removed = tokenizer.decode(tokens[-1:])
    if len(tokens) < 2 or not text.endswith(removed) or not removed:
        return tokens, ""
    return tokens[:-1], removed


def begins_with(text: str) -> Structured | None:
    """The constraint that an answer begins with `text`; None for no text."""
    literal = "".join(f"\\x{{{ord(character):X}}}" for character in text)
    return Structured.regex(rf"{literal}(.|\n)*") if text else None


def _empty_answers(
    engine: Engine, prompts: Sequence[str], params: SamplingParams, heal: bool
) -> int:
    """Number of answers of spaces and newlines only."""
    as_is = ((engine.tokenizer.encode(text), "") for text in prompts)
    given = [healed(engine.tokenizer, text) for text in prompts] if heal else list(as_is)
    each = [replace(params, structured=begins_with(removed)) for _, removed in given]
    completions = engine.generate([tokens for tokens, _ in given], each)
    pairs = zip(completions, given, strict=True)
    return sum(not one.text.removeprefix(removed).strip() for one, (_, removed) in pairs)


def prompt_ends(options: Options, environment: dict) -> list[dict]:
    """Continues prompts of each end, appends a row for each to `options.out`, and returns the rows.

    Raises:
      ConfigError: the model has no tokenizer, or the source has no such place.
    """
    models = Models.load(options)
    if models.tokenizer is None:
        raise ConfigError("prompts are cut from text; the model has no tokenizer")
    source = Path(options.source)
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    texts = [text for text in map(read_text, files) if len(text) > _LEAST]
    prompts = {
        end: cuts(texts, end, options.num_prompts, options.characters, options.seed) for end in ENDS
    }
    for end, found in prompts.items():
        if not found:
            raise ConfigError(f"{source}: holds no text to cut ({end})")
    config = EngineConfig(max_num_seqs=options.concurrency, max_model_len=options.max_model_len)
    params, done = sampling(options), []
    for method, num_draft, engine in engines(models, options, config):
        for end, found in prompts.items():
            empty = _empty_answers(engine, found, params, options.heal)
            row = {
                "kind": "prompt-ends",
                **models.identity(
                    options, prompts=options.source, variant=(method, num_draft),
                    concurrency=options.concurrency,
                ),
                "end": end,
                "healed": options.heal,
                "prompts": len(found),
                "empty": empty / len(found),
                **environment,
            }  # fmt: skip
            done.append(rows.rounded(row))
            rows.append(options.out, done[-1])
    return done
