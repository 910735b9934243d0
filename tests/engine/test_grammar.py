"""Grammars and their masks, without a model: drafts, markers of reasoning, hostile grammars."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from peagle_jax import ConfigError
from peagle_jax.cli.model_folders import ASSETS
from peagle_jax.engine.structured import grammar, mask_threads
from peagle_jax.engine.structured.grammar import Grammars, Matcher, masks_of
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"]


def backend() -> Backend:
    return Backend.from_file(str(ASSETS / "target" / "tokenizer.json"))


def load(backend: Backend, folder) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tokenizer:
    return load(backend(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Tokenizer:
    """As in Qwen3: the markers of reasoning are added tokens, and not special."""
    changed = backend()
    changed.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return load(changed, tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory) -> Tokenizer:
    changed = backend()
    changed.add_special_tokens(HARMONY)
    return load(changed, tmp_path_factory.mktemp("harmony"))


def size_of(tokenizer: Tokenizer) -> int:
    """Vocabulary of a target that is a little larger than the tokenizer's, as most are."""
    return tokenizer.vocab_size + 17


def grammars(tokenizer: Tokenizer, eos_ids=(0,)) -> Grammars:
    return Grammars(tokenizer, size_of(tokenizer), eos_ids)


def allowed_by(matcher: Matcher, drafts: list[int], size: int) -> np.ndarray:
    """[len(drafts) + 1, V] bool: what each row of a round allows."""
    masks = masks_of([(matcher, drafts)], size=1, height=len(drafts) + 1)
    return bits_of(masks[0])[:, :size]


def bits_of(masks: np.ndarray) -> np.ndarray:
    return np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little").astype(bool)


def one_by_one(matcher_of, drafts: list[int], size: int) -> list[np.ndarray | None]:
    """The rows of a window by fresh matchers; None behind a forbidden draft."""
    rows = []
    for number in range(len(drafts) + 1):
        matcher = matcher_of()
        matcher.consume(drafts[:number])
        rows.append(None if matcher.error else allowed_by(matcher, [], size)[0])
    return rows


@pytest.fixture(params=["one thread", "several threads"])
def threads(request, monkeypatch):
    """How many threads compute the masks of a matcher; by default that depends on their time."""
    monkeypatch.setattr(mask_threads, "_NUM_CORES", 1 if request.param == "one thread" else 8)
    monkeypatch.setattr(grammar, "_COSTLY", -1.0)


@pytest.mark.usefixtures("threads")
def test_the_rows_of_a_window_are_those_of_its_drafts_one_by_one(plain, num_cases):
    """Random windows over texts that the grammar allows, most with a draft that it forbids."""
    rng, compiler = random.Random(0), grammars(plain)
    size = size_of(plain)
    texts = ['{"name": "Ada", "age": 36}', '{"name":"q\\"","age":-1}', '{ "name" : "", "age": 0 }']
    broken = 0
    for _ in range(num_cases("windows of drafts", 40)):
        text = plain.encode(rng.choice(texts), special=False)
        start = rng.randint(0, len(text))
        drafts = text[start : start + rng.randint(0, 7)]
        if drafts and rng.random() < 0.7:
            drafts[rng.randrange(len(drafts))] = rng.randrange(size)

        def fresh(start=start, text=text) -> Matcher:
            matcher = compiler.compile(Structured.json_schema(PERSON))
            matcher.consume(text[:start])
            return matcher

        matcher = fresh()
        if matcher.error:  # the text has spaces where this grammar takes none
            continue
        got = allowed_by(matcher, drafts, size)
        for row, want in zip(got, one_by_one(fresh, drafts, size), strict=True):
            assert row.all() if want is None else np.array_equal(row, want)
            broken += want is None
        assert matcher.error is None, "a window leaves the matcher where it was"
    assert broken > 0


def write(matcher: Matcher, rng: random.Random, size: int, eos: int, most: int) -> list[int]:
    """A random text of a grammar; it ends where the grammar allows an end and chance wants it."""
    tokens = []
    while len(tokens) < most:
        allowed = np.flatnonzero(allowed_by(matcher, [], size)[0])
        assert len(allowed), "no token is allowed"
        token = eos if eos in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        if token == eos:
            return tokens
        tokens.append(token)
        matcher.consume([token])
        assert matcher.error is None
    return tokens


@pytest.mark.parametrize(
    ("structured", "check"),
    [
        (Structured.regex(r"[0-9]{3}-[a-f]+/x"), lambda t: t[3] == "-" and t.endswith("/x")),
        (Structured.choice(["yes", 'no "é"\n', "😀"]), {"yes", 'no "é"\n', "😀"}.__contains__),
        (
            Structured.grammar('start: "a" b\nb: "b" | "[" b "]"'),
            lambda t: t.count("[") == t.count("]"),
        ),
        (
            Structured.grammar('root ::= "x" y\ny ::= [0-9]'),
            lambda t: len(t) == 2 and t[1].isdigit(),
        ),
        (
            Structured.json_schema({"enum": ["a", 1, None]}),
            lambda t: json.loads(t) in ("a", 1, None),
        ),
        (Structured.json_schema(True), lambda t: json.loads(t) is not ...),
    ],
)
def test_every_kind_of_constraint_gives_texts_that_obey_it(plain, structured, check):
    compiler, rng, ended = grammars(plain), random.Random(1), 0
    for _ in range(5):
        matcher = compiler.compile(structured)
        tokens = write(matcher, rng, size_of(plain), 0, most=60)
        if matcher.is_complete:
            ended += 1
            assert check(plain.decode(tokens)), plain.decode(tokens)
    assert ended


def test_harmony_constrains_the_final_message(harmony):
    compiler = grammars(harmony, eos_ids=[harmony.added["<|return|>"]])
    encode = lambda text: harmony.encode(text, special=False)
    prompt = encode("<|start|>user<|message|>Who?<|end|><|start|>assistant")
    assert compiler.reasoning_after(prompt) == "harmony"
    assert compiler.reasoning_after([*prompt, harmony.added["<|channel|>"]]) == "none"
    matcher = compiler.compile(Structured("json_schema", json.dumps(PERSON), "harmony"))
    thought = "<|channel|>analysis<|message|>They {ask}.<|end|><|start|>assistant"
    matcher.consume(
        encode(f'{thought}{thought}<|channel|>final<|message|>{{"name": "A", "age": 1}}')
    )
    assert matcher.error is None
    assert matcher.is_complete
    allowed = allowed_by(matcher, [], size_of(harmony))[0]
    assert np.flatnonzero(allowed).tolist() == [harmony.added["<|return|>"]]
    matcher = compiler.compile(Structured("json_schema", json.dumps(PERSON), "harmony"))
    matcher.consume(encode("<|channel|>final<|message|>Hello"))
    assert matcher.error


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        ("user: hi\nassistant:\n", "optional"),
        ("user: <think></think> hi\nassistant:\n", "optional"),
        ("user: hi\nassistant:\n<think>\n\n</think>\n\n", "none"),
        ("user: hi\nassistant:\n<think>\n", "open"),
        ("user: <think> hi </think>\nassistant:\n<think>", "open"),
    ],
)
def test_the_prompt_says_what_comes_before_an_answer(thinking, plain, prompt, reasoning):
    assert grammars(thinking).reasoning_after(thinking.encode(prompt)) == reasoning
    assert grammars(plain).reasoning_after(plain.encode(prompt)) == "none"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Structured.json_schema("{"), "not JSON"),
        (lambda: Structured.json_schema("[1]"), "must be a JSON object"),
        (lambda: Structured.json_schema({"type": "nope"}), "Invalid type: nope"),
        (lambda: Structured.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Structured.json_schema({"not": {}}), "not"),
        (lambda: Structured.json_schema({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "oneOf"),
        (lambda: Structured.json_schema({"$ref": "http://localhost/x"}), "not present"),
        (lambda: Structured.json_schema({"$ref": "#"}), "no text can"),
        (lambda: Structured.json_schema(False), "nsatisfiable"),
        (lambda: Structured.regex("(a"), "not a regular expression: unclosed group"),
        (
            lambda: Structured.json_schema({"type": "string", "pattern": "(?=a)b"}),
            "not a regular expression: look-around, including look-ahead",
        ),
        (lambda: Structured.regex("a" * 300_000), "more than the 262144"),
        (lambda: Structured.choice([]), "at least one"),
        (lambda: Structured.choice(["a", ""]), "empty"),
        (lambda: Structured.grammar("nothing"), "grammar"),
        (lambda: Structured.grammar('root ::= "a'), "not a grammar"),
        (lambda: Structured.grammar('start: "a" b'), "b"),
        (lambda: Structured.grammar("root ::= x"), "'x' not found"),
        (lambda: Structured.grammar("\n"), "root"),
        (lambda: Structured.grammar('root ::= "a"\nroot ::= "b"'), "rule 'root' is defined twice"),
    ],
)
def test_what_is_no_constraint_is_refused_in_one_line(plain, make, reason):
    with pytest.raises(ConfigError) as caught:
        grammars(plain).compile(make())
    assert caught.value.field == "structured"
    assert reason in caught.value.rule, caught.value.rule
    assert "\n" not in caught.value.rule


def test_a_model_without_an_end_cannot_be_constrained(plain):
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        grammars(plain, eos_ids=()).compile(Structured.json_object())


def test_a_constraint_with_slow_masks_fails_and_its_neighbour_does_not(plain, monkeypatch):
    monkeypatch.setattr(grammar, "_SLOW_MASK", 2e-4)
    monkeypatch.setattr(grammar, "_SLOW_CALL", 2e-4)
    slow, fast = (grammars(plain).compile(Structured.regex(f"a{{{n}}}")) for n in (8000, 10))
    letter = plain.encode("a", special=False)[0]
    masks_of([(slow, [letter] * 7), (fast, [letter] * 7)], size=2, height=8)
    assert slow.error == "the constraint cannot be continued: a mask takes more than 0.2 ms"
    assert fast.error is None


@pytest.mark.usefixtures("threads")
def test_a_grammar_beyond_its_limits_says_so_and_allows_nothing_more(plain):
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(60))
    matcher = grammars(plain).compile(Structured.grammar(f'start: "x" r0\n{rules}\nr60: "a" | '))
    matcher.consume(plain.encode("x", special=False))
    allowed_by(matcher, [plain.encode("a", special=False)[0]] * 40, size_of(plain))
    assert "cannot be continued" in matcher.error


SPELLED = "a<|endoftext|>b<|pad|>"


@pytest.mark.parametrize(
    "structured",
    [
        Structured("choice", json.dumps([SPELLED])),
        Structured("json_schema", json.dumps({"const": SPELLED})),
        Structured("regex", r"a<\|endoftext\|>b<\|pad\|>"),
        Structured("grammar", f'start: "{SPELLED}"'),
        Structured("grammar", f'root ::= "{SPELLED}"'),
    ],
    ids=lambda one: one.kind,
)
def test_the_spelling_of_a_special_token_is_text(plain, structured):
    """Where the grammar forces these characters, tokens of text do, and no special token."""
    made = grammars(plain)
    matcher, tokens = made.compile(structured), []
    while True:
        row = allowed_by(matcher, [], size_of(plain))[0]
        token = int(np.flatnonzero(row)[0])
        if token == 0:
            break
        assert token not in plain.special_ids
        tokens.append(token)
        matcher.consume([token])
    assert plain.decode(tokens).strip('"') == SPELLED


def test_a_grammar_may_name_a_special_token(plain):
    matcher = grammars(plain).compile(Structured("grammar", 'start: "a" <|pad|> "b"'))
    matcher.consume(plain.encode("a", special=False))
    (token,) = np.flatnonzero(allowed_by(matcher, [], size_of(plain))[0])
    assert plain.spell([int(token)]) == "<|pad|>"


def test_half_a_surrogate_pair_around_an_answer_is_refused(plain):
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        grammars(plain).compile(Structured("json_object", "", around="start: \ud800 @text"))


def test_a_special_token_that_is_made_of_merges_can_be_spelled(tmp_path):
    """As in vocabularies that were converted with a merge for every token."""
    content = json.loads(backend().to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for left, right in (("<", "b"), ("<b", "o"), ("<bo", "s"), ("<bos", ">")):
        vocab.setdefault(left + right, len(vocab))
        merges.append([left, right])
    content["added_tokens"].append(
        content["added_tokens"][0] | {"id": vocab["<bos>"], "content": "<bos>"}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    matcher, tokens = grammars(tokenizer).compile(Structured("choice", '["a<bos>b"]')), []
    while not matcher.is_complete:
        row = allowed_by(matcher, [], size_of(tokenizer))[0]
        tokens.append(int(np.flatnonzero(row)[0]))
        matcher.consume(tokens[-1:])
    assert tokenizer.decode(tokens) == "a<bos>b"
