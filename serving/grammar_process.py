"""Checks constraints of clients in a process of its own, because a hostile one can exhaust time,
memory or stack.

    python -m serving.grammar_process
    stdin:  one JSON object per line: a `Vocabulary`, then constraints
            {"kind", "text", "around", "frame"}
    stdout: one JSON object per constraint: {"definition", "memory"}, or {"error"}; memory is the
            bytes that it takes compiled

The process leaves the processor to others. A constraint that exceeds a limit ends the process; its
parent starts another (`constraints.Process`). The server compiles a constraint that passes again,
which takes the same time.
"""

import json
import sys
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from llguidance import LLTokenizer, TokenizerWrapper

from peagle_jax import ConfigError
from peagle_jax.engine.structured.grammar import definition, new_matcher
from peagle_jax.structured import Structured
from peagle_jax.text.bounded_process import answer_all, limit_memory, limit_time
from peagle_jax.text.tokenizer import Tokenizer
from serving.constraint_memory import allocated

CPU_SECONDS = 2
MEMORY = 512 << 20
"""Bytes of address space beyond those of the idle process."""
MOST_COMPILED = 32 << 20
"""Bytes of a constraint when it is compiled."""
_PER_CHARACTER = 100
"""The same for a character of a definition, where the C library does not count."""
STACK = 1 << 20
"""Bytes of stack, an eighth of what a thread of the server has."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary that a check needs: its size, and the tokens outside the text.

    All other tokens of the check are single bytes, because the texts that a grammar allows do not
    depend on how they are split.
    """

    size: int
    eos_ids: list[int]
    special: dict[str, int]  # ids by spelling

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_ids: Collection[int]) -> Self:
        """The vocabulary of a model."""
        return cls(size, sorted(eos_ids), tokenizer.added)

    def tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it."""
        return LLTokenizer(TokenizerWrapper(_Bytes(self)), eos_token=self.eos_ids)


class _Bytes:
    """A tokenizer of single bytes beside the special tokens, in the form of `TokenizerWrapper`."""

    def __init__(self, vocabulary: Vocabulary):
        special = {token: name for name, token in vocabulary.special.items()}
        free = (token for token in range(vocabulary.size + 256) if token not in special)
        self._of_byte = [next(free) for _ in range(256)]
        self.eos_token_id, self.bos_token_id = vocabulary.eos_ids[0], None
        self.special_token_ids = sorted(special)
        self.tokens = [b""] * max(vocabulary.size, *(token + 1 for token in self._of_byte))
        for byte, token in enumerate(self._of_byte):
            self.tokens[token] = bytes([byte])
        for token, name in special.items():
            self.tokens[token] = name.encode()

    def __call__(self, text: bytes) -> list[int]:
        return [self._of_byte[byte] for byte in text]


def _check(
    given: Mapping[str, str | None], special: Mapping[str, int], tokenizer: LLTokenizer
) -> dict[str, str | int]:
    try:
        structured = Structured(given["kind"], given["text"], around=given["around"])
        text = definition(structured, given["frame"], special)
        before = allocated()
        matcher = new_matcher(tokenizer, text)
        after = allocated()
        del matcher
    except ConfigError as error:
        return {"error": error.rule}
    memory = _PER_CHARACTER * len(text) if after is None else max(0, after - before)
    if memory > MOST_COMPILED:
        return {
            "error": f"is too complex: it takes {memory >> 20} MiB, more than {MOST_COMPILED >> 20}"
        }
    return {"definition": text, "memory": memory}


def main() -> None:
    """Reads the vocabulary and constraints from stdin until its end."""
    vocabulary = Vocabulary(**json.loads(sys.stdin.readline()))
    tokenizer = vocabulary.tokenizer()
    threading.stack_size(STACK)
    limit_memory(MEMORY)
    with ThreadPoolExecutor(1) as small_stack:

        def check(constraint: Mapping[str, str | None]) -> dict[str, str]:
            limit_time(CPU_SECONDS)
            given = constraint, vocabulary.special, tokenizer
            return small_stack.submit(_check, *given).result()

        answer_all(check)


if __name__ == "__main__":
    main()
