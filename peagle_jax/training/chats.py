"""Prompts and chats as rows of tokens: what is given, trained, and written by the target.

    {"messages": [...]}   a chat; without a last answer the target writes it
    {"prompt": "..."}     and the other rows of `peagle_jax.text.prompts`; a user's turn
    another file, or a folder's *.py, *.txt and *.md: text, cut into prompts

All turns of the assistant in a chat are trained, up to the token that ends each.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from peagle_jax.config import ConfigError
from peagle_jax.text.prompts import prompt_of, read_rows, read_text
from peagle_jax.text.tokenizer import Tokenizer

_SUFFIXES = (".py", ".txt", ".md")


class Row(NamedTuple):
    """Tokens of a text, which of them are trained, and whether the target shall go on."""

    tokens: tuple[int, ...]
    answer: tuple[bool, ...]
    is_open: bool

    def reopened(self) -> "Row":
        """The row up to its last answer, which the target is to write."""
        if self.is_open:
            return Row(self.tokens, (False,) * len(self.tokens), True)
        end = max(i for i, trained in enumerate(self.answer) if trained)
        start = max((i + 1 for i in range(end) if not self.answer[i]), default=0)
        return Row(self.tokens[:start], (False,) * start, True)


def read(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    *,
    chat: bool | None,
    prompt_tokens: int,
) -> list[Row]:
    """The different rows of files and folders, in their order.

    Args:
      chat: whether prompts of JSON rows are turns of a user; None: if there is a chat template.
      prompt_tokens: of the pieces that plain text is cut into, with gaps of the same length.
    Raises:
      ConfigError: names the file and the line that holds no text, or a template that fails.
    """
    chat = bool(tokenizer.template_source) if chat is None else chat
    rows: dict[Row, None] = {}
    for path in paths:
        if path.suffix == ".jsonl":
            found = (
                _of_json(row, where, tokenizer, eos_ids, chat) for where, row in read_rows(path)
            )
        else:
            found = _pieces(path, tokenizer, prompt_tokens)
        rows |= dict.fromkeys(found)
    return list(rows)


def _open(tokens: Sequence[int]) -> Row:
    return Row(tuple(tokens), (False,) * len(tokens), True)


def _pieces(path: Path, tokenizer: Tokenizer, size: int) -> Iterator[Row]:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    for file in files:
        tokens = tokenizer.encode(read_text(file))
        for start in range(0, max(1, len(tokens) - size), 2 * size):
            if piece := tokens[start : start + size]:
                yield _open(piece)


def _of_json(row, where: str, tokenizer: Tokenizer, eos_ids: Collection[int], chat: bool) -> Row:
    if not isinstance(row, dict) or "messages" not in row:
        text = prompt_of(row, where).text
        if not isinstance(text, str):
            return _open(text)
        if not chat:
            return _open(tokenizer.encode(text))
        row = dict(messages=[dict(role="user", content=text)])
    try:
        return _of_chat(_checked(row["messages"]), tokenizer, eos_ids)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked(messages) -> list[dict]:
    is_text = lambda one: (
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
    )
    if not isinstance(messages, list) or not messages or not all(map(is_text, messages)):
        raise ConfigError("messages must be a list of objects with the texts role and content")
    return messages


def _of_chat(messages: list[dict], tokenizer: Tokenizer, eos_ids: Collection[int]) -> Row:
    """Every answer is encoded by itself, as the engine writes it behind its prompt."""
    is_open = messages[-1]["role"] != "assistant"
    whole = tokenizer.chat_text(messages, ending="reply" if is_open else "closed")
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    starts = [len(before) for before in (tokenizer.chat_text(messages[:i]) for i in answers)]
    for i, start in zip(answers, starts, strict=True):
        if tokenizer.chat_text(messages[:i]) != whole[:start]:
            raise ConfigError(
                "the chat template writes earlier turns in another way than the last one; "
                "give chats of one answer"
            )
    tokens = tokenizer.encode(whole[: starts[0] if starts else None], special=False)
    trained = [False] * len(tokens)
    for i, (start, stop) in zip(answers, pairwise([*starts, len(whole)]), strict=True):
        ids = tokenizer.encode(whole[start:stop], special=False)
        ends = [place + 1 for place, token in enumerate(ids) if token in eos_ids]
        if not ends:  # the template ends a turn with other tokens
            content = messages[i]["content"].strip()
            end = whole.rfind(content, start, stop) + len(content)
            ends = [len(tokenizer.encode(whole[start:end], special=False))]
        tokens += ids
        trained += [place < ends[0] for place in range(len(ids))]
    return Row(tuple(tokens), tuple(trained), is_open)
