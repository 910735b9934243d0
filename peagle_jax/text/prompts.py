"""Reads prompt files: JSONL rows of HumanEval, of MT-Bench, or of our own format.

    {"task_id": "HumanEval/0", "prompt": "def ...", ...}      HumanEval as released, right-stripped
    {"question_id": 81, "turns": ["...", "..."], ...}         MT-Bench as released: the first turn
    {"prompt": "def ..." or [1, 2], "max_tokens": 64, ...}    fields of SamplingParams beside it

Errors name the file and the line. This module does not import jax.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peagle_jax.config import ConfigError
from peagle_jax.options import converted, options_of
from peagle_jax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    `name` is its id in the file, or `where`; `where` is its file and line, or its number; `options`
    are its own SamplingParams fields.
    """

    name: str
    where: str
    text: str | list[int]
    options: dict

    def params(self, base: SamplingParams) -> SamplingParams:
        """`base` with this prompt's own options.

        Raises:
          ConfigError: a value is out of range; the message names the prompt.
        """
        try:
            return replace(base, **self.options)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error


def _is_list_of(kind: type, value) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _options(row: dict, where: str) -> dict:
    known = options_of(SamplingParams)
    options = {key: value for key, value in row.items() if key != "prompt"}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"{where}: unknown option {unknown[0]!r}; known are prompt, {', '.join(sorted(known))}"
        )
    for key, value in options.items():
        try:
            options[key] = converted(known[key], value, texts_are_numbers=False)
        except ConfigError as error:
            raise ConfigError(f"{where}: {key}={error}") from None
    return options


def prompt_of(row, where: str) -> Prompt:
    """The prompt of a JSON row.

    Raises:
      ConfigError: it has none; the message begins with `where`.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be a JSON object")
    if "task_id" in row:
        name, text, options = str(row["task_id"]), row.get("prompt"), {}
        # HumanEval prompts end in a newline. Tokenizers merge a newline with the indentation after
        # it, so training text never stops there, and a model would end the text at once.
        text = text.rstrip() if isinstance(text, str) else text
    elif "question_id" in row:
        turns = row.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else None
        name, options = f"MT-Bench/{row['question_id']}", {}
    else:
        name, text, options = where, row.get("prompt"), _options(row, where)
    if not isinstance(text, str) and not _is_list_of(int, text):
        raise ConfigError(f"{where}: no prompt; it must be a string or a list of token ids")
    return _checked(Prompt(name=name, where=where, text=text, options=options))


def _checked(prompt: Prompt) -> Prompt:
    where = prompt.where
    if not prompt.text:
        raise ConfigError(f"{where}: the prompt is empty")
    try:
        _ = isinstance(prompt.text, str) and prompt.text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ConfigError(f"{where}: the prompt is not valid Unicode ({error})") from error
    return prompt


def read_text(path: Path) -> str:
    """Content of a file.

    Raises:
      ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_jsonl(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file; blank lines are skipped.

    Raises:
      ConfigError: names the file and the line.
    """
    return [prompt_of(row, where) for where, row in read_rows(path)]


def read_rows(path: Path) -> list[tuple[str, object]]:
    """(file and line, JSON value) of each line of a JSONL file; blank lines are skipped.

    Raises:
      ConfigError: a line is not JSON, or there is none.
    """
    rows = []
    # Not splitlines(): it would split at U+2028, which JSON strings may contain unescaped.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            rows.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error})") from error
    if not rows:
        raise ConfigError(f"{path}: holds no prompts")
    return rows


def from_arguments(texts: Iterable[str]) -> list[Prompt]:
    """Prompts from the command line, unchanged.

    Raises:
      ConfigError: one is empty, or not valid Unicode.
    """
    names = ((f"prompt {number}", text) for number, text in enumerate(texts, 1))
    return [_checked(Prompt(name=name, where=name, text=text, options={})) for name, text in names]


def from_files_or_texts(items: Iterable[str]) -> list[Prompt]:
    """Each item a JSONL file (by its name), another file (one prompt), or a prompt itself.

    Raises:
      ConfigError: a file cannot be read, or a prompt is empty.
    """
    prompts = []
    for item in items:
        if item.endswith(".jsonl"):
            prompts += read_jsonl(Path(item))
        elif _is_file(item):
            whole = Prompt(name=item, where=item, text=read_text(Path(item)), options={})
            prompts.append(_checked(whole))
        else:
            prompts += from_arguments([item])
    return prompts


def find_runnable(
    names: Sequence[str], check: Callable[[int], object]
) -> tuple[list[int], list[str]]:
    """Separates the prompts that can run from the others, so that one invalid prompt does not end a
    run.

    Args:
      names: names of the prompts for messages: a file and a line, or a number.
      check: called with each prompt's number; raises `ConfigError` if it cannot run.

    Returns:
      The numbers of the prompts that can run, and a line "name: reason" for each of the others.

    Raises:
      ConfigError: none can run; the message is the first such line.
    """
    numbers, left_out = [], []
    for number, name in enumerate(names):
        try:
            check(number)
        except ConfigError as error:
            left_out.append(f"{name}: {error}")
        else:
            numbers.append(number)
    if left_out and not numbers:
        raise ConfigError(left_out[0])
    return numbers, left_out


def _is_file(item: str) -> bool:
    try:
        return Path(item).is_file()
    except (OSError, ValueError):  # a prompt may be too long for a path, or hold a NUL
        return False


def greedy(params: SamplingParams, name: str) -> SamplingParams:
    """`params` for a comparison of methods: without logprobs, with the engine's number of drafts.

    Raises:
      ConfigError: the temperature is not 0, so outputs cannot be compared token by token.
    """
    if params.temperature != 0:
        raise ConfigError(f"{name}: temperature={params.temperature} but --compare is greedy")
    return replace(params, logprobs=None, num_speculative_tokens=None)
