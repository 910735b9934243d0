"""`/tokenize` and `/detokenize`, in vLLM's form."""

from serving.errors import invalid
from serving.http.chat import Message, TemplateFields
from serving.http.errors import OPENAI
from serving.http.fields import Fields, Integers, listed
from serving.http.route import Caller, Encode, Route
from serving.tools import Arguments


class TokenizeFields(TemplateFields):
    """Fields of `/tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: listed(Message, is_needed=True) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """Fields of `/detokenize`."""

    model: str | None = None
    tokens: Integers


class Tokenize(Route[TokenizeFields]):
    """The tokens of a text or a conversation."""

    path = "/tokenize"
    dialect = OPENAI
    fields = TokenizeFields

    def _prepare(self, fields: TokenizeFields, caller: Caller) -> Encode:
        frontend = self._frontend
        encode = self._chat(fields) if fields.prompt is None else self._text(fields)

        async def answer() -> dict:
            tokens = await encode()
            names = None
            if fields.return_token_strs:
                names = await frontend.names(tokens, field="return_token_strs")
            return {
                "count": len(tokens),
                "max_model_len": frontend.config.max_model_len,
                "tokens": tokens,
                "token_strs": names,
            }

        return answer

    def _text(self, fields: TokenizeFields):
        if fields.messages is not None:
            raise invalid("messages", "and prompt are both given; give one of them")
        special = fields.add_special_tokens is not False
        return lambda: self._frontend.encode(fields.prompt, field="prompt", special=special)

    def _chat(self, fields: TokenizeFields):
        if fields.messages is None:
            raise invalid("prompt", "is missing; give it or messages")
        if fields.add_special_tokens:
            raise invalid("add_special_tokens", "is for a prompt: a chat template has its own")
        tools = fields.allowed_tools(self._frontend)
        arguments = Arguments(self._frontend.limits)
        messages = [
            message.variables(arguments, f"messages[{place}]")
            for place, message in enumerate(fields.messages)
        ]
        variables, ending = fields.chat_template_kwargs or {}, fields.ending
        return lambda: self._frontend.chat(
            messages, variables, tools=tools, field="messages", ending=ending
        )


class Detokenize(Route[DetokenizeFields]):
    """The text of tokens."""

    path = "/detokenize"
    dialect = OPENAI
    fields = DetokenizeFields

    def _prepare(self, fields: DetokenizeFields, caller: Caller) -> Encode:
        frontend = self._frontend
        tokens, most = fields.tokens, frontend.config.max_model_len
        if len(tokens) > most:
            raise invalid(
                "tokens", f"{len(tokens)} are more than the {most} of a prompt and its output"
            )
        size = frontend.target_config.vocab_size
        for place, token in enumerate(tokens):
            if not 0 <= token < size:
                raise invalid(
                    "tokens", f"{token} at {place} is no token id: they are 0 to {size - 1}"
                )

        async def answer() -> dict:
            return {"prompt": await frontend.decode(tokens, field="tokens")}

        return answer
