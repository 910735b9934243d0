"""Servers whose model emits given replies, so that tests know what a reply contains."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import pre_tokenizers

from peagle_jax import Engine
from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny
from tests.programs import OneBucketConfig
from tests.serving.live import LiveServer
from tests.vocabularies import byte_level

END = "<|im_end|>"
VOCAB = 272
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "é.py", "line": "3"}}\n</tool_call>'
READ = {"path": "é.py", "line": 3}
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
}
"""A call of the tool `read` as Qwen3 writes it, its arguments by the schema, and the schema."""

TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content if m.content == "" }}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.path }}</tool_call>{% endfor %}
{%- endfor %}<|assistant|>{{ "<no think>" if enable_thinking is false }}"""
"""A chat template that shows what it gets, with the signs of Qwen3's format."""


def make_tokenizer(
    folder: Path,
    template: str,
    *,
    special: Sequence[str] = (),
    tokens: Sequence[str] = (),
    **settings,
) -> Tokenizer:
    """All bytes, special tokens with `END` first, and added tokens that are text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = dict(special=(END, *special), added=tokens, chat_template=template) | settings
    return byte_level(folder, letters, **settings)


class Script:
    """Makes an engine emit given tokens: each new request gets the next reply, and the last one for
    ever.

    Attributes:
      replies: the tokens of each reply.
      requests: the requests that have got a token.
    """

    def __init__(self, engine: Engine, *replies: Sequence[int]):
        self.replies = list(replies)
        self.requests: list = []
        self._of_request: dict = {}
        self._original = engine.scheduler._receive
        engine.scheduler._receive = self._receive

    def _receive(self, request, row, tokens, count, logprobs):
        if request not in self._of_request:
            self.requests.append(request)
            is_last = len(self.replies) == 1
            self._of_request[request] = self.replies[0] if is_last else self.replies.pop(0)
        start = len(request.output)
        reply = list(self._of_request[request][start : start + count])
        return self._original(request, row, [*reply, *tokens[len(reply) :]], count, logprobs)


def make_engine(tokenizer: Tokenizer, end: str = END, **sizes) -> Engine:
    """An engine of the tiny model, without drafts, that ends a text at the special token `end`.

    Engines of all tokenizers that have at most `VOCAB` tokens share their programs.
    """
    config = dict(num_draft=0, max_num_seqs=4, max_model_len=1024, page_size=16, prefill_chunk=64)
    config |= dict(max_waiting=64, max_logprobs=3)
    end_id = tokenizer.special_id(end)
    longest = {"max_position": sizes["max_model_len"]} if "max_model_len" in sizes else {}
    shape = tiny.ONE_LAYER | longest | dict(vocab_size=max(VOCAB, tokenizer.vocab_size))
    target = tiny.target(**shape, eos_ids=(end_id,))
    return Engine(target, None, OneBucketConfig(**(config | sizes)), tokenizer=tokenizer)


class Scripted:
    """A server and the script of its model; `special`, `tokens`: see `make_tokenizer`."""

    def __init__(
        self,
        folder,
        *,
        special: Sequence[str] = (),
        added: Sequence[str] = (),
        sizes: dict[str, int] | None = None,
        **options,
    ):
        self.tokenizer = make_tokenizer(
            folder, TEMPLATE, special=special, tokens=added, eos_token=END
        )
        engine = make_engine(self.tokenizer, **(sizes or {}))
        self.script = Script(engine, [])
        self.live = LiveServer(engine, http=True, **options)

    def say(self, *replies: str) -> None:
        """The next requests get these replies, further ones the last."""
        self.script.requests.clear()
        self.script.replies[:] = [self.tokenizer.encode(f"{one}<|im_end|>") for one in replies]

    @property
    def prompts(self) -> list[str]:
        """The prompts since the last call of `say`, as texts."""
        return [self.tokenizer.spell(one.prompt) for one in self.script.requests]
