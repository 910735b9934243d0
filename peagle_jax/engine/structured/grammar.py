"""Structured output: masks of the tokens that a grammar allows, by llguidance. Host code, no jax
here.

A round verifies drafts, so it needs one mask for each draft and one for the token after them. Row j
is the mask after drafts 1..j. A draft that its row forbids has probability 0 in the masked target,
so verification rejects it there, and the rows behind it are not used. Matchers consume committed
tokens only: nothing is rolled back, and a preempted request keeps its matcher.
"""

import itertools
import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import llguidance
import numpy as np
from llguidance import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask_par

from peagle_jax.engine.structured import lark
from peagle_jax.engine.structured.mask_threads import MaskThreads
from peagle_jax.engine.structured.schema_rules import enforceable
from peagle_jax.engine.structured.special_tokens import without_spellings
from peagle_jax.errors import ConfigError
from peagle_jax.method.plan import mask_words
from peagle_jax.structured import MAX_CHARS, Reasoning, Structured
from peagle_jax.text.tokenizer import Tokenizer

ALL = -1
"""A mask word that allows 32 tokens."""
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=5_000,  # 1,200 optional properties side by side, as many as take 10 ms a mask
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms a mask
    step_max_items=20_000,  # 1 ms a mask
    max_lexer_states=16_384,  # up to 30 MB a request
    max_grammar_size=250_000,
    verbose_errors=False,
)
"""Work and memory of one grammar. A request that exceeds them fails; at run time it gets no further
token."""
MOST_FORCED = 8192
"""Bytes of text that a constraint may force at its beginning. llguidance follows all of them before
`LIMITS` hold, with 0.4 KB each, and splits what is left of them for each mask: 1 ms for so many."""
_SLOW_CALL, _SLOW_MASK = 0.05, 0.005
"""If the masks of a call take longer than the first (seconds), each matcher is measured; if one
mask takes more processor time than the second, its request fails."""
_COSTLY = 0.002
"""If the masks of one matcher take longer (seconds), several threads compute them, each for some of
the drafts."""
_MARKERS = (("<think>", "</think>"), ("<|channel>", "<channel|>"), ("[THINK]", "[/THINK]"))
"""Before and after reasoning: Qwen3 and others, Gemma 4, Mistral."""
_HARMONY = tuple(f"<|{name}|>" for name in ("channel", "message", "start", "end"))


def masks_of(
    rows: Sequence[tuple["Matcher | None", Sequence[int]]], *, size: int, height: int
) -> np.ndarray | None:
    """The masks of a call, [size, height, mask_words(V)] int32 (see `plan`); None without a
    constrained row.

    Args:
      rows: for each row a matcher, or None without a constraint, and the drafts that the call
        verifies, fewer than `height`.
      size: rows of the call, padding included.
    """
    matchers = [matcher for matcher, _ in rows if matcher is not None]
    if not matchers:
        return None
    # llguidance leaves the masks behind a forbidden draft unwritten.
    masks = np.full((size, height, matchers[0].num_words), ALL, np.int32)
    flat = masks.reshape(size * height, -1)
    begin, threads = time.perf_counter(), matchers[0].threads
    places = [(row, *pair) for row, pair in enumerate(rows) if pair[0] is not None]
    costs = [matcher.seconds * (1 + len(drafts)) for _, matcher, drafts in places]
    if threads.most // len(matchers) > 1 and max(costs) > _COSTLY:
        divided = []
        for row, matcher, drafts in places:
            divided += zip(matcher.after(drafts), itertools.count(row * height), strict=False)
        fill_next_token_bitmask_par(threads.pool(threads.most), divided, flat)
        used = (time.perf_counter() - begin) * min(threads.most, len(divided))
        total, even = sum(costs), used / len(divided)
        for matcher in matchers:
            matcher.seconds = matcher.seconds * used / total if total else even
    else:
        windows = [(one.matcher, row * height, list(drafts)) for row, one, drafts in places]
        unknown = [place for place, one in enumerate(matchers) if not one.seconds]
        for place, seconds in threads.fill(windows, flat, unknown).items():
            matchers[place].seconds = seconds / (1 + len(windows[place][2]))
    for row, matcher, drafts in places:
        matcher.close(drafts, masks[row])
    if time.perf_counter() - begin > _SLOW_CALL:
        for matcher in matchers:
            matcher.measure()
    return masks


class Matcher:
    """State of one request's text in its grammar. Made by `Grammars`.

    Args:
      beginning: at the beginning of the text; the sequences of a request share it. It is copied at
        the first use, so one that waits holds no memory of its own.
    """

    def __init__(
        self,
        beginning: llguidance.LLMatcher,
        threads: MaskThreads,
        eos_ids: Collection[int],
        num_words: int,
    ):
        self._beginning, self.threads, self.eos_ids = beginning, threads, eos_ids
        self.num_words = num_words
        """Words of a mask."""
        self.seconds = 0.0
        """Estimated processor time of one mask; 0 before the first call of `masks_of`."""
        self.lease: object = None
        """What must live as long as this matcher."""
        self._is_slow = False
        self._copies: list[llguidance.LLMatcher] = []

    @cached_property
    def matcher(self) -> llguidance.LLMatcher:
        """Where the text stands."""
        return self._beginning.deep_copy()

    @property
    def error(self) -> str | None:
        """One sentence, if the matcher exceeded a limit or met a token that its masks forbid. It is
        final."""
        if self._is_slow:
            limit = 1e3 * _SLOW_MASK
            return f"the constraint cannot be continued: a mask takes more than {limit:g} ms"
        for one in (self.matcher, *self._copies):
            if one.is_error():
                return f"the constraint cannot be continued: {_reason(one.get_error())}"
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self.matcher.is_accepting()

    def after(self, drafts: Sequence[int]) -> list[llguidance.LLMatcher]:
        """The matcher after drafts 1..j, for j from 0, up to a draft that is forbidden or ends the
        text.

        An error of one of them is an error of this matcher, until it takes tokens.
        """
        matchers, self._copies = [self.matcher], []
        for draft in drafts:
            copy = matchers[-1].deep_copy()
            self._copies.append(copy)
            if copy.try_consume_tokens([draft]) != 1 or draft in self.eos_ids:
                break
            matchers.append(copy)
        return matchers

    def consume(self, tokens: Iterable[int]) -> None:
        """Advances by committed tokens; see `error`. End tokens after the end of the text are
        ignored."""
        self._copies = []
        for token in tokens:
            if not (self.matcher.is_stopped() and token in self.eos_ids):
                self.matcher.consume_token(token)

    def measure(self) -> None:
        """Sets `error` if one mask takes too long, whatever else the processor does."""
        begin = time.thread_time()
        self.matcher.compute_bitmask()
        self._is_slow = time.thread_time() - begin > _SLOW_MASK

    def close(self, drafts: Sequence[int], masks: np.ndarray) -> None:
        """Allows further ends only, in the rows behind a draft that ends the text: llguidance
        leaves them out."""
        end = next((place for place, draft in enumerate(drafts) if draft in self.eos_ids), None)
        if end is not None:
            ends = np.zeros(32 * self.num_words, np.uint8)
            ends[list(self.eos_ids)] = 1
            masks[end + 1 :] = np.packbits(ends, bitorder="little").view(np.int32)

    def again(self) -> "Matcher":
        """A matcher at the beginning, for another sequence of the same request. The two share
        `LIMITS`."""
        other = Matcher(self._beginning, self.threads, self.eos_ids, self.num_words)
        other.lease = self.lease
        return other

    def forced(self, most: int) -> list[int]:
        """Up to `most` next tokens that are the only continuation in the tokenizer's own
        splitting."""
        return self.matcher.compute_ff_tokens()[:most] if most else []


@dataclass(frozen=True)
class Markers:
    """Ids of a vocabulary's tokens around reasoning. None: the vocabulary does not have them."""

    block: tuple[int, int] | None  # begin and end of a block of reasoning
    harmony: tuple[int, ...] | None  # channel, message, start, end

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Markers":
        """The markers in a vocabulary."""
        ids = lambda names: tuple(map(tokenizer.added.get, names))
        blocks = (ids(names) for names in _MARKERS)
        block = next((pair for pair in blocks if None not in pair), None)
        harmony = ids(_HARMONY)
        return cls(block, None if None in harmony else harmony)

    def frame(self, reasoning: Reasoning | None) -> str | None:
        """A Lark grammar that puts reasoning before `@answer`; None if there is none."""
        match reasoning:
            case "optional" | "open" if self.block:
                begin, end = self.block
                rules = [
                    "start: rest @answer"
                    if reasoning == "open"
                    else f"start: (<[{begin}]> rest)? @answer",
                    # Qwen3 writes an empty line between its reasoning and its answer.
                    rf'rest: text <[{end}]> ("\n\n" | "\n")?',
                ]
            case "harmony" if self.harmony:
                channel, message, start, end = self.harmony
                rules = [
                    "start: thought* final",
                    f'thought: <[{channel}]> "analysis" <[{message}]> text <[{end}]> '
                    f'<[{start}]> "assistant"',
                    f'final: <[{channel}]> "final" <[{message}]> @answer',
                ]
            case _:
                return None
        return "\n".join([*rules, r"text: /(.|\n)*/"])


def definition(structured: Structured, frame: str | None, special: Mapping[str, int]) -> str:
    """The constraint as llguidance reads it.

    Args:
      frame: see `Markers.frame`.
      special: ids of the tokens that a grammar may name, by spelling.

    Raises:
      ConfigError: the text is too long, not a grammar, or a schema in it cannot be enforced
        (`schema_rules`).
    """
    size = len(structured.text) + len(structured.around)
    if size > MAX_CHARS:
        rule = f"{size} characters are more than the {MAX_CHARS} that are allowed"
        raise ConfigError.of("structured", rule)
    for text in (structured.text, structured.around):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = f"character {error.start + 1}"
            rule = f"{place} is half of a surrogate pair, which no text can contain"
            raise ConfigError.of("structured", rule) from None
    try:
        grammars = [_answer(structured) | {"name": "text" if structured.around else "answer"}]
        if structured.around:
            around = lark.with_schemas(structured.around, enforceable)
            grammars.insert(0, {"lark_grammar": around, "name": "answer"})
    except RecursionError:
        raise ConfigError.of("structured", "a schema is nested too deeply") from None
    if frame is not None:
        grammars.insert(0, {"lark_grammar": frame})
    for one in grammars:
        if "lark_grammar" in one:
            one["lark_grammar"] = lark.by_number(one["lark_grammar"], special)
    return json.dumps({"grammars": grammars})


def _answer(structured: Structured) -> dict:
    text = structured.text
    match structured.kind:
        case "json_object":
            return {"json_schema": enforceable({"type": "object"})}
        case "json_schema":
            return {"json_schema": enforceable(json.loads(text))}
        case "regex":
            return json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(lark.literal, json.loads(text)))}
    if name := lark.twice_defined(text):
        raise ConfigError.of("structured", f"not a grammar (rule {name!r} is defined twice)")
    try:
        grammar = gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # llguidance raises `Exception` itself for some mistakes
        raise ConfigError.of("structured", f"not a grammar ({_reason(str(error))})") from None
    return {"lark_grammar": lark.with_schemas(grammar, enforceable)}


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe.

    Args:
      tokenizer: the model's.
      vocab_size: the target's; at least the tokenizer's.
      eos_ids: tokens that may end a text, and only where its grammar allows an end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]):
        self.markers = Markers.of(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._threads = MaskThreads()

    def prepare(self) -> None:
        """Reads the vocabulary, which takes a second or two for 150 thousand tokens. `matcher`
        needs it.

        Raises:
          ConfigError: the vocabulary cannot be used for constraints.
        """
        with self._lock:
            if self._vocabulary is not None:
                return
            if not self._eos_ids:
                rule = "the model has no end-of-sequence token, so a constrained text could not end"
                raise ConfigError.of("structured", rule)
            try:
                self._vocabulary = llguidance.LLTokenizer(
                    without_spellings(self._tokenizer.to_json()),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._eos_ids),
                )
            except ValueError as error:
                rule = f"the model's tokenizer cannot be used ({_reason(str(error))})"
                raise ConfigError.of("structured", rule) from error

    def located(self, structured: Structured, prompt: Sequence[int]) -> Structured:
        """The constraint of a chat's answer, with the reasoning that may come before it."""
        if structured.reasoning is not None:
            return structured
        return replace(structured, reasoning=self.reasoning_after(prompt))

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning:
        """The kind of reasoning that may come before the answer to a chat's prompt."""
        marker, text = self._end(prompt)
        match self.markers:
            case Markers(harmony=(_, _, start, _)):
                return "harmony" if marker == start and text == "assistant" else "none"
            case Markers(block=(begin, end)):
                if marker == begin:
                    return "open"
                return "none" if marker == end and not text else "optional"
        return "none"

    def _end(self, prompt: Sequence[int]) -> tuple[int | None, str]:
        """The last marker in a prompt, and the stripped text after it."""
        ids = {*(self.markers.harmony or ()), *(self.markers.block or ())}
        place = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in ids), None)
        if place is None:
            return None, ""
        return prompt[place], self._tokenizer.decode(prompt[place + 1 :]).strip()

    def compile(self, structured: Structured) -> Matcher:
        """A matcher at the beginning of the constrained text.

        A hostile constraint can exhaust time, memory or stack of the process: `LIMITS` do not hold
        while schemas are read. `serving.constraints` checks what clients send in a process of its
        own.

        Raises:
          ConfigError: the constraint is not valid, not supported, or too complex; `field` is
            "structured".
        """
        frame = self.markers.frame(structured.reasoning)
        return self.matcher(definition(structured, frame, self._tokenizer.added))

    def matcher(self, definition: str) -> Matcher:
        """`compile` of a constraint that `definition` has translated."""
        self.prepare()
        matcher = new_matcher(self._vocabulary, definition)
        return Matcher(matcher, self._threads, self._eos_ids, mask_words(self._vocab_size))


def new_matcher(vocabulary: llguidance.LLTokenizer, definition: str) -> llguidance.LLMatcher:
    """Compiles what `definition` returned.

    Raises:
      ConfigError: the constraint is not valid, not supported, or too complex; `field` is
        "structured".
    """
    matcher = llguidance.LLMatcher(vocabulary, definition, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars without any text
        forced = len(matcher.compute_ff_bytes())
        if forced > MOST_FORCED:
            rule = f"it forces a text of {forced} bytes at once; at most {MOST_FORCED} are allowed"
            raise ConfigError.of("structured", rule)
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = "no text can satisfy it"
        grammars = (one.get("lark_grammar", "") for one in json.loads(definition)["grammars"])
        raise ConfigError.of("structured", lark.named(reason, grammars))
    return matcher


def _reason(text: str) -> str:
    """The reason in llguidance's message, at most 200 characters: its first line.

    The parser of regular expressions repeats the pattern first and gives the reason in the last
    line.
    """
    lines = text.strip().splitlines() or ["no reason given"]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"not a regular expression: {reasons[-1]}"[:200] if reasons else lines[0][:200]
