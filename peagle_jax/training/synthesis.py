"""Questions that a chat model asks itself: what it writes where its template has the user's turn.

No data set is needed (arXiv 2406.08464). Questions that share ten words in a row with a text of
`exclude`, as those of an evaluation, are left out.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.prompts import prompt_of, read_rows
from peagle_jax.text.tokenizer import Tokenizer
from peagle_jax.training.answers import claim
from peagle_jax.training.curves import write_whole

_PLACE = "PLACEHOLDER7Q"
_LEAST, _MOST = 12, 2000  # characters of a question
_WORDS = 10


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """How many questions are sampled, how long, and whose words they must not share."""

    num: int
    max_tokens: int
    temperature: float
    exclude: tuple[Path, ...]
    concurrency: int
    seed: int


def user_turn(tokenizer: Tokenizer) -> str:
    """The text of the chat template up to the content of the first user's turn."""
    text = tokenizer.chat_text([dict(role="user", content=_PLACE)])
    before, found, _ = text.partition(_PLACE)
    if not found or not before:
        raise ConfigError(
            "the chat template has nothing before a user's turn, so questions cannot be sampled"
        )
    return before


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(_WORDS)), strict=False)


def excluded_grams(paths: tuple[Path, ...]) -> set[tuple[str, ...]]:
    """Ten-word sequences of the prompts of JSONL files.

    Raises:
      ConfigError: a file cannot be read.
    """
    texts = (prompt_of(row, where).text for path in paths for where, row in read_rows(path))
    return {gram for text in texts if isinstance(text, str) for gram in _grams(text)}


def claim_folder(out: Path, options: SynthesisOptions, target: list) -> None:
    """Notes whose questions `out` has; target is its `answers.identity`.

    Raises:
      ConfigError: `out` has questions of another target or other options.
    """
    free = dict(num=None, concurrency=None, exclude=None)  # which parts do not depend on
    claim(out, asdict(options) | free | dict(target=target))


def synthesize(engine: Engine, options: SynthesisOptions, out: Path) -> int:
    """Writes `prompts.jsonl` to a claimed folder, chats of one question each; returns their number.

    Finished parts are kept, so a killed run goes on after the last one, also with another
    concurrency or number of questions.
    """
    avoided = excluded_grams(options.exclude)
    prefix = engine.tokenizer.encode(user_turn(engine.tokenizer), special=False)
    size, found, start = 4 * options.concurrency, {}, 0
    with tqdm(total=options.num, unit="question", mininterval=1.0) as bar:
        while start < options.num:
            part = out / f"part-{start:07d}.json"
            if not part.exists():
                numbers = range(start, min(start + size, options.num))
                write_whole(part, json.dumps(_sampled(engine, prefix, numbers, options)))
            texts = json.loads(part.read_text())[: options.num - start]
            found |= dict.fromkeys(x for x in texts if x and is_allowed(x, avoided))
            bar.update(len(texts))
            start += len(texts)
    rows = (dict(messages=[dict(role="user", content=text)]) for text in found)
    write_whole(out / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return len(found)


def _sampled(
    engine: Engine, prefix: list[int], numbers: range, options: SynthesisOptions
) -> list[str | None]:
    """The questions of these numbers; None where the model has not ended one."""
    given = dict(max_tokens=options.max_tokens, temperature=options.temperature)
    params = [SamplingParams(seed=question_seed(options.seed, i), **given) for i in numbers]
    done = engine.generate([prefix] * len(params), params)
    return [one.text.strip() if one.finish_reason == "stop" else None for one in done]


def question_seed(seed: int, number: int) -> int:
    """Of a question: all begin alike, so with seed + number the runs of seeds 0 and 1 would ask the
    same questions."""
    state = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def is_allowed(text: str, avoided: set[tuple[str, ...]]) -> bool:
    """Whether a question is of a question's length, and free of `excluded_grams`."""
    return _LEAST <= len(text) <= _MOST and avoided.isdisjoint(_grams(text))
