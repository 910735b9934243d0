"""Names of tokens in `/tokenize`."""

import asyncio
import threading

from serving.limits import Limits
from serving.tokenizing import Encoder

SECONDS = 60  # limit of every wait


def test_names_of_many_tokens_are_made_outside_of_the_event_loop(tokenizer):
    async def names(tokens):
        threads = set()
        encoder = Encoder(Watched(tokenizer, threads), Limits(), max_model_len=96)
        found = await asyncio.wait_for(encoder.names(tokens, field="tokens"), SECONDS)
        encoder.close()
        await encoder.wait_closed(SECONDS)
        return found, threads

    for tokens, is_elsewhere in (([1, 2], False), ([1, 2] * 5000, True)):
        found, threads = asyncio.run(names(tokens))
        assert found == [tokenizer.name_of(token) for token in tokens]
        assert len(threads) == 1
        assert (threads != {threading.get_ident()}) == is_elsewhere


class Watched:
    """A tokenizer that notes the threads in which tokens are named."""

    def __init__(self, tokenizer, threads: set[int]):
        self._tokenizer, self._threads = tokenizer, threads
        self.longest_token = tokenizer.longest_token

    def name_of(self, token: int) -> str:
        self._threads.add(threading.get_ident())
        return self._tokenizer.name_of(token)
