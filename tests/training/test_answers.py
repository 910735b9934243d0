"""From prompts to a head: rows of tokens, the target's answers, the mask token, the stage."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tqdm import tqdm

from peagle_jax import EngineConfig, SamplingParams, load
from peagle_jax.checkpoint import load_head, load_target
from peagle_jax.cli.model_folders import embedded
from peagle_jax.config import ConfigError
from peagle_jax.text.tokenizer import Tokenizer
from peagle_jax.training import __main__ as command
from peagle_jax.training import answers, chats, synthesis
from peagle_jax.training.mask_token import mask_token
from tests import tiny
from tests.training.conftest import EOS, VOCAB


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arrays_of(path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def read(paths, folder, chat=None):
    return chats.read(paths, Tokenizer(folder), (EOS,), chat=chat, prompt_tokens=8)


CHAT = [
    dict(role="user", content="add two"),
    dict(role="assistant", content="def add(a, b):"),
    dict(role="user", content="more"),
    dict(role="assistant", content="    return a + b"),
]


def test_all_answers_of_a_chat_are_trained_to_the_token_that_ends_each(folder, tmp_path):
    tokenizer = Tokenizer(folder)
    (row,) = read([jsonl(tmp_path / "chats.jsonl", dict(messages=CHAT))], folder)
    assert tokenizer.spell(row.tokens) == tokenizer.chat_text(CHAT, ending="closed")
    trained = [
        token for token, is_trained in zip(row.tokens, row.answer, strict=True) if is_trained
    ]
    written = "def add(a, b):<|endoftext|>    return a + b<|endoftext|>"
    assert tokenizer.spell(trained) == written
    assert not row.is_open
    again = row.reopened()
    assert again.is_open
    assert tokenizer.spell(again.tokens) == tokenizer.chat_text(CHAT[:3])


def test_prompts_go_through_the_template_and_text_does_not(folder, tmp_path):
    tokenizer = Tokenizer(folder)
    prompts = jsonl(tmp_path / "p.jsonl", dict(prompt="hi"), dict(prompt="hi"), dict(prompt=[5, 6]))
    (tmp_path / "text.txt").write_text("word " * 40)
    chat, ids, *pieces = read([prompts, tmp_path / "text.txt"], folder)
    assert list(chat.tokens) == tokenizer.chat([dict(role="user", content="hi")])
    assert ids.tokens == (5, 6)
    assert pieces
    assert all(row.is_open and len(row.tokens) == 8 for row in pieces)
    plain, *_ = read([prompts], folder, chat=False)
    assert list(plain.tokens) == tokenizer.encode("hi")


@pytest.mark.parametrize(
    "messages", [[], "hi", [dict(role="user")], [dict(role="user", content=[1])], [7]]
)
def test_a_line_that_is_no_chat_is_named(folder, tmp_path, messages):
    path = jsonl(tmp_path / "bad.jsonl", dict(prompt="fine"), dict(messages=messages))
    with pytest.raises(ConfigError, match=r"bad.jsonl:2: messages must be a list"):
        read([path], folder)


def test_packed_rows_hold_every_text_once():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 33, 50)
    texts = [
        answers.Written(np.full(n, i, np.uint32), 0, np.ones(n, bool))
        for i, n in enumerate(lengths)
    ]
    rows = answers.pack(texts, 32, rng)
    assert all(sum(len(one.tokens) for one in row) <= 32 for row in rows)
    assert sorted(int(one.tokens[0]) for row in rows for one in row) == list(range(50))
    assert len(rows) <= 1.2 * sum(lengths) / 32 + 1


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        pytest.param([*range(20)] + [7, 8, 9] * 40, 26, id="a loop, up to its second round"),
        pytest.param([*range(20)] + [7, 8, 9] * 40 + [7], 26, id="cut within a round"),
        pytest.param([*range(20)] + [7, 8, 9] * 40 + [1], 141, id="it ends by itself"),
        pytest.param([*range(40)] * 2, 80, id="said twice"),
        pytest.param([5] * 30, 30, id="too short to tell"),
        pytest.param([], 0, id="empty"),
    ],
)
def test_an_answer_that_ends_in_a_loop_is_cut(tokens, kept):
    assert answers.without_loop(tokens) == tokens[:kept]


@pytest.mark.parametrize(
    ("given", "used", "chosen"),
    [
        (None, [9], 1),  # <|mask|>
        (None, [1, 9], 3),  # the first reserved one
        (None, [1, *range(3, 8)], VOCAB),  # an id without a token
        (77, [9], 77),
        (77, [77], "--mask-token-id 77: the texts have this token"),
        (VOCAB + 8, [9], f"--mask-token-id {VOCAB + 8}: the target's ids end at {VOCAB + 7}"),
    ],
)
def test_the_mask_token_is_one_that_no_text_has(given, used, chosen):
    config = replace(tiny.TARGET, vocab_size=VOCAB + 8)
    find = lambda: mask_token(given, embedded("target"), config, [np.array(used)])
    if isinstance(chosen, int):
        assert find() == chosen
    else:
        with pytest.raises(ConfigError, match=chosen):
            find()


def test_a_target_without_a_tokenizer_needs_a_mask_token(tmp_path):
    with pytest.raises(ConfigError, match="give --mask-token-id"):
        mask_token(None, tmp_path, tiny.TARGET, [np.arange(9)])


def test_questions_are_different_and_share_no_ten_words_with_an_evaluation(folder, tmp_path):
    evaluated = "one two three four five six seven eight nine ten eleven"
    texts = [
        evaluated,
        "what is a good name?",
        "what is a good name?",
        "short",
        "never ended, so not kept",
    ]

    class Engine:
        tokenizer = Tokenizer(folder)
        calls, asked = 0, []

        def generate(self, prompts, params):
            Engine.calls += 1
            Engine.asked.append(params)
            assert Engine.tokenizer.spell(prompts[0]) == "[user] "
            found = texts[: len(prompts)]
            end = lambda text: "length" if "never" in text else "stop"
            return [SimpleNamespace(text=text, finish_reason=end(text)) for text in found]

    options = synthesis.SynthesisOptions(
        num=5,
        max_tokens=9,
        temperature=1.0,
        concurrency=2,
        seed=0,
        exclude=(jsonl(tmp_path / "eval.jsonl", dict(prompt=f"so: {evaluated}")),),
    )
    out = tmp_path / "out"
    for folder in (out, tmp_path / "other"):
        synthesis.claim_folder(folder, options, ["target"])
    for _ in range(2):  # the second time nothing is left to do
        assert synthesis.synthesize(Engine(), options, out) == 1
    assert Engine.calls == 1
    assert synthesis.synthesize(Engine(), replace(options, seed=1), tmp_path / "other") == 1
    assert len({one.seed for params in Engine.asked for one in params}) == 2 * len(texts)
    (row,) = map(json.loads, (tmp_path / "out" / "prompts.jsonl").read_text().splitlines())
    assert row == dict(messages=[dict(role="user", content="what is a good name?")])


def test_questions_go_on_with_another_concurrency_and_number(folder, tmp_path):
    asked, limit = [], 4

    class Engine:
        tokenizer = Tokenizer(folder)

        def generate(self, prompts, params):
            if len(asked) == limit:
                raise KeyboardInterrupt
            asked.extend(one.seed for one in params)
            ends = ["length" if i == 1 else "stop" for i in range(len(params))]
            questions = (f"what about number {one.seed}?" for one in params)
            return [
                SimpleNamespace(text=text, finish_reason=end)
                for text, end in zip(questions, ends, strict=True)
            ]

    options = synthesis.SynthesisOptions(
        num=9, max_tokens=9, temperature=1.0, concurrency=1, seed=0, exclude=()
    )
    out = tmp_path / "out"
    synthesis.claim_folder(out, options, ["target"])
    with pytest.raises(KeyboardInterrupt):
        synthesis.synthesize(Engine(), options, out)
    limit = None
    for number, concurrency in ((9, 2), (14, 1), (6, 3)):
        changed = replace(options, num=number, concurrency=concurrency)
        synthesis.claim_folder(out, changed, ["target"])
        synthesis.synthesize(Engine(), changed, out)
        rows = (out / "prompts.jsonl").read_text().splitlines()
        found = [json.loads(row)["messages"][0]["content"] for row in rows]
        wanted = [synthesis.question_seed(0, i) for i in range(number)]
        never_ended = {1, 5, 10}  # the second of each part
        kept = [seed for i, seed in enumerate(wanted) if i not in never_ended]
        assert found == [f"what about number {seed}?" for seed in kept]
    assert asked == [synthesis.question_seed(0, i) for i in range(14)]
    for target, other in ((["another"], options), (["target"], replace(options, seed=1))):
        with pytest.raises(ConfigError, match="remove it or choose another --out"):
            synthesis.claim_folder(out, other, target)
    (out / "request.json").unlink()  # parts of an unknown request
    with pytest.raises(ConfigError, match="remove it or choose another --out"):
        synthesis.claim_folder(out, options, ["target"])


def test_a_killed_run_goes_on_with_another_concurrency_and_answers_each_prompt_once(tmp_path):
    rows = [chats.Row((i,), (i in (2, 6),), i not in (2, 6)) for i in range(11)]
    asked = []

    class Engine:
        def generate(self, prompts, params, on_update):
            if len(asked) == 3:
                asked.append("killed")
                raise KeyboardInterrupt
            asked.extend(
                (*prompt, one.seed, one.temperature)
                for prompt, one in zip(prompts, params, strict=True)
            )
            return [SimpleNamespace(tokens=[100 + prompt[0]]) for prompt in prompts]

    options = answers.AnswerOptions(
        prompts=(),
        chat=None,
        prompt_tokens=1,
        length=8,
        max_tokens=4,
        num_heldout=1,
        temperatures=(0.0, 1.0),
        concurrency=1,
        seed=0,
    )
    folder, bar = tmp_path / "train", tqdm(disable=True)
    with pytest.raises(KeyboardInterrupt):
        answers._answered(Engine(), rows, options, folder, bar)
    for concurrency in (2, 1):
        options = replace(options, concurrency=concurrency)
        written = answers._answered(Engine(), rows, options, folder, bar)
        texts = [[i] if i in (2, 6) else [i, 100 + i] for i in range(11)]
        assert [text.tokens.tolist() for text in written] == texts
    each = [(i, i, i % 2) for i in range(11) if i not in (2, 6)]  # prompt, seed, temperature
    assert asked == [*each[:3], "killed", *each[3:]]


def test_a_template_without_a_users_turn_asks_nothing(tmp_path):
    with pytest.raises(ConfigError, match="nothing before a user's turn"):
        synthesis.user_turn(Tokenizer(embedded("target")))


def test_prompts_become_a_head_that_is_lossless_and_a_killed_run_goes_on(
    folder, tmp_path, capsys, monkeypatch, shared_programs
):
    words = ["alpha", "beta", "gamma"]
    rows = [dict(prompt=f"say {a} and {b}") for a in words for b in words]
    prompts = jsonl(tmp_path / "prompts.jsonl", *rows, dict(messages=CHAT))
    line = (
        f"head --target {folder} --prompts {prompts} --out {tmp_path}/run --length 48 "
        "--max-tokens 12 "
        "--step-tokens 96 --epochs 1 --layers 1 --concurrency 1 --num-heldout 2 --share embedding "
        "unembedding --speculators"
    ).split()
    assert command.main([*line, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "10 prompts, 9 answers; " in printed
    assert "GiB  in all" in printed
    assert not (tmp_path / "run").exists()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(answers, "pack", interrupt)
        assert command.main(line) == 130
    text = tmp_path / "run" / "text"
    first, *_, last = parts = sorted((text / "train").glob("part-*.npz"))
    assert len(parts) == 3
    kept, before = first.stat().st_mtime_ns, arrays_of(last)
    last.unlink()
    assert command.main(line) == 0
    assert "GiB  in all" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == kept
    for key, array in arrays_of(last).items():
        np.testing.assert_array_equal(array, before[key])
    assert arrays_of(text / "train.npz")["answer"].any(axis=1).all()
    config = EngineConfig(num_draft=3, max_num_seqs=1, max_model_len=64, prefill_chunk=16)
    params, head = SamplingParams(max_tokens=12, ignore_eos=True), tmp_path / "run" / "final"
    drafted = load(folder, head, config=config).generate(["say beta"], params)[0]
    target = load_target(folder, dtype="float32")
    assert [drafted.tokens] == tiny.greedy(target, [drafted.prompt], 12)
    assert drafted.drafted > 0
    names = "final", "speculators"
    heads = [load_head(head.parent / name, target.config, dtype="float32") for name in names]
    heads[0].selector = None
    for one, other in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(SystemExit):
        command.main([*line, "--max-tokens", "13"])
    assert "texts of another model, or of other prompts or options" in capsys.readouterr().err


def test_a_plan_needs_no_weights(capsys):
    assert (
        command.main(["plan", "--preset", "gpt-oss-20b", "--bits", "4.25", "--tflops", "800"]) == 0
    )
    lines = capsys.readouterr().out
    assert "minutes at 800 TFLOP/s" in lines
    total = float(lines.split("GiB  in all")[0].split()[-1])
    assert 30 < total < 80
