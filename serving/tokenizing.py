"""Converts prompts to token ids: too long prompts are refused first, long ones are tokenised in
threads.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from peagle_jax.config import ConfigError
from peagle_jax.text import chat_templates
from peagle_jax.text.bounded_process import UnavailableError
from peagle_jax.text.tokenizer import Ending, Tokenizer
from serving.bounded_pool import BoundedPool
from serving.errors import Code, PromptTooLong, ServiceError, invalid, unavailable
from serving.limits import Limits
from serving.memory import MemoryReturn

_SHORT = 4096
"""Most characters that are tokenised in the event loop, in about 2 ms; longer texts get a thread.
"""
_SHORT_CHAT = 64  # messages
_CHARS_OF_OTHERS = 8  # of a number, true, false or null
_MAX_WAITING = 64  # long prompts
_MAX_WAITING_CHATS = 1024  # short ones
_NO_VARIABLES = {
    *("self", "messages", "conversation", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *(
        "ending",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tools",
    ),
    "tokenizer_kwargs",
}
"""Arguments of transformers' functions that apply a chat template. Clients may not set them."""


class Encoder:
    """Converts the prompts of all requests to token ids.

    Long prompts have threads of their own, so they delay no short prompt.

    Args:
      tokenizer: None if the model is served without one; then every text is refused.
      max_model_len: tokens of prompt and output together.
      memory: schedules a trim of the heap after long prompts.

    Attributes:
      max_chars: most characters of a prompt: the limit, or what fits into `max_model_len` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        *,
        max_model_len: int,
        memory: MemoryReturn | None = None,
    ):
        self._tokenizer, self._limits = tokenizer, limits
        self._memory = memory or MemoryReturn()
        self._max_model_len = max_model_len
        self._longest = 1 if tokenizer is None else tokenizer.longest_token
        self.max_chars = min(limits.max_prompt_chars, max_model_len * self._longest)
        self._long = BoundedPool(
            "tokenizer",
            "long prompts",
            num_threads=limits.tokenizer_threads,
            max_waiting=_MAX_WAITING,
        )
        # One process renders templates, so more threads would not be faster.
        self._chats = BoundedPool("chat", "chats", num_threads=1, max_waiting=_MAX_WAITING_CHATS)

    async def encode(self, text: str, *, field: str, special: bool = True) -> list[int]:
        """Token ids of a prompt. `special` adds the tokenizer's special tokens.

        Raises:
          ServiceError: the model has no tokenizer; the text is too long or not valid; too many long
            texts wait.
        """
        tokenizer = self._required(field)
        self._check_size(len(text), field, self.max_chars)
        encode = _naming(field, lambda: tokenizer.encode_in_time(text, special=special))
        is_quick = len(text) <= _SHORT and not tokenizer.may_take_forever
        return encode() if is_quick else await self._run_long(encode, len(text))

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        *,
        tools: Sequence[Mapping] = (),
        field: str,
        variables_field: str = "chat_template_kwargs",
        ending: Ending = "reply",
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template; raises as `encode` does.

        Args:
          variables: for the template; `variables_field` is the client's name of them.
          ending: as `Tokenizer.chat_text` takes it.
        """
        tokenizer = self._required(field)
        messages = [_known_role(one, tokenizer.template_source) for one in messages]
        if taken := sorted(variables.keys() & _NO_VARIABLES):
            rule = f"{taken[0]!r} is no variable of a chat template; leave it out"
            raise invalid(variables_field, rule)
        size = _num_chars([variables, messages, tools])
        # The template may leave text out, so the limit of the model is checked after it.
        self._check_size(size, field, self._limits.max_prompt_chars)

        def encode() -> list[int]:
            given = {"tools": list(tools)} if tools else {}
            render = partial(tokenizer.chat_text, ending=ending, **variables, **given)
            text = _without_loss(render, messages)
            self._check_size(len(text), field, self.max_chars)
            # The template writes special tokens itself.
            return tokenizer.encode_in_time(text, special=False)

        is_short = size <= _SHORT and len(messages) <= _SHORT_CHAT
        if is_short:
            return await self._chats.run(_naming(field, encode))
        return await self._run_long(_naming(field, encode), size)

    async def decode(self, tokens: Sequence[int], *, field: str) -> str:
        """Text of tokens, special ones spelled.

        Raises:
          ServiceError: the model has no tokenizer.
        """
        tokenizer = self._required(field)
        decode = lambda: tokenizer.spell(tokens)
        return decode() if len(tokens) <= _SHORT else await self._long.run(decode)

    async def names(self, tokens: Sequence[int], *, field: str) -> list[str]:
        """Names of tokens, as reports show them; raises as `decode` does."""
        tokenizer = self._required(field)
        name = lambda: [tokenizer.name_of(token) for token in tokens]
        return name() if len(tokens) <= _SHORT else await self._long.run(name)

    def prepare(self) -> asyncio.Future:
        """Starts to load the chat template, which takes seconds; chats wait for it. Returns its
        end.
        """
        has_chats = self._tokenizer is not None
        return asyncio.ensure_future(
            self._chats.run(self._tokenizer.prepare_chat) if has_chats else asyncio.sleep(0)
        )

    def close(self) -> None:
        """Takes no more texts."""
        self._long.close()
        self._chats.close()

    async def wait_closed(self, seconds: float) -> bool:
        """Waits until no thread works on a text, for at most `seconds`; returns whether none does.

        A chat template that runs is ended after half of them.
        """
        pools = self._long, self._chats
        for _ in range(2):
            are_closed = await asyncio.gather(*(pool.wait_closed(seconds / 2) for pool in pools))
            if all(are_closed):
                return True
            chat_templates.interrupt()
        return False

    async def _run_long(self, encode: Callable[[], list[int]], size: int) -> list[int]:
        try:
            return await self._long.run(encode)
        finally:
            self._memory.schedule(size)

    def _required(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                f"{field}: this model is served without a tokenizer; send token ids",
            )
        return self._tokenizer

    def _check_size(self, size: int, field: str, most: int) -> None:
        if size <= most:
            return
        rule = f"{size} characters are more than the {most} that this server takes"
        least = -(-size // self._longest)
        excess = f"{size} characters > {most}"
        if least > self._max_model_len:
            excess = f"{least} tokens > {self._max_model_len - 1}"
        raise PromptTooLong(field, rule, max_model_len=self._max_model_len, excess=excess)


def _known_role(message: Mapping[str, object], template: str) -> Mapping[str, object]:
    """OpenAI's role developer is system where a template does not know it: many templates drop such
    messages.
    """
    if message.get("role") != "developer" or "developer" in template:
        return message
    return {**message, "role": "system"}


def _without_loss(
    render: Callable[[list[Mapping[str, object]]], str], messages: Sequence[Mapping[str, object]]
) -> str:
    """The text of a conversation. Agents send rules as later messages of the system, which some
    templates refuse and some leave out, as GPT-OSS's does: these messages become the user's."""
    later = [one.get("role") in ("system", "developer") for one in messages[1:]]
    try:
        text = render(list(messages))
    except UnavailableError:  # the renderer was ended: another one would take as long
        raise
    except ConfigError:
        if not any(later):
            raise
        text = ""

    def shown(message: Mapping[str, object], is_rule: bool) -> Mapping[str, object]:
        is_lost = is_rule and str(message.get("content") or "").strip() not in text
        return {**message, "role": "user"} if is_lost else message

    changed = [*messages[:1], *map(shown, messages[1:], later)]
    return text if text and changed == list(messages) else render(changed)


def _num_chars(value: object) -> int:
    """Characters of all texts within a JSON value; other values count as a few."""
    num_chars, values = 0, [value]
    while values:
        one = values.pop()
        if isinstance(one, Mapping):
            num_chars += sum(map(len, one))
            values += one.values()
        elif isinstance(one, list | tuple):
            values += one
        else:
            num_chars += len(one) if isinstance(one, str) else _CHARS_OF_OTHERS
    return num_chars


def _naming(field: str, encode: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """Wraps `encode` so that its errors name the client's field."""

    def named() -> list[int]:
        try:
            return encode()
        except UnavailableError as error:
            raise unavailable(error) from error
        except ConfigError as error:
            raise invalid(field, str(error)) from error

    return named
