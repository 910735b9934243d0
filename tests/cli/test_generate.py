"""`peagle-generate` on a tiny random model: what it prints, and that it prints the right text."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peagle_jax.cli import runs
from peagle_jax.text.tokenizer import Tokenizer
from tests.waiting import LIMIT

SHORT = ["--max-tokens", "12", "-K", "3"]
COMPARED = [*SHORT, "--concurrency", "2", "--adaptive", "off"]
"""Without the rounds of other K, which a choice by load would compile."""
PROMPT = "def quicksort(xs):"


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_one_prompt_is_echoed_and_continued_and_measured(generate, folders):
    code, out, err = generate(PROMPT, *folders.options(), *SHORT)
    assert code == 0
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 1
    assert out.endswith("\n")
    assert re.search(r"[\d.]+ tokens/s \(12 tokens in .* s\), time to first token", err)
    assert re.search(r"P-EAGLE K=3: acceptance length [\d.]+ over \d+ rounds; .*: \d", err)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_is_one_line_of_error(generate, folders, form, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = generate(PROMPT, *folders.options("none"), *SHORT, *form)
    assert code == 2
    last = "peagle-generate: error: the output cannot be written (No space left on device)"
    assert err.splitlines()[-1] == last


def test_json_gives_tokens_counts_and_timings_for_each_prompt_and_a_summary(generate, folders):
    code, out, _ = generate(
        PROMPT,
        "return xs",
        *folders.options(),
        *COMPARED,
        "--json",
        "--logprobs",
        "2",
    )
    first, second, summary = objects(out)
    assert code == 0
    assert first["prompt"] == PROMPT
    assert second["prompt"] == "return xs"
    tokenizer = Tokenizer(folders.target)
    for one in (first, second):
        assert one["prompt_tokens"] == tokenizer.encode(one["prompt"])
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert len(one["tokens"]) == len(one["logprobs"])
        assert one["accepted"] == sum(one["accepted_per_position"])
        assert one["drafted"] == 3 * one["rounds"]
        assert 0 < one["time_to_first_token"] <= one["duration"]
    summary = summary["summary"]
    assert summary["tokens"] == 24
    assert summary["dtype"] == "float32"
    rounds, accepted = (first[key] + second[key] for key in ("rounds", "accepted"))
    assert summary["acceptance_length"] == pytest.approx((24 - 2) / rounds)
    assert sum(summary["acceptance_per_position"]) == pytest.approx(accepted / rounds)


def test_text_ends_before_a_stop_string(generate, folders):
    _, out, _ = generate(PROMPT, *folders.options("none"), *SHORT)
    tail = out[len(PROMPT) :].rstrip("\n")
    stop = next(c for c in tail if c.isprintable() and c != "\ufffd")
    code, out, _ = generate(PROMPT, *folders.options(), *SHORT, "--stop", stop)
    assert code == 0
    assert out == PROMPT + tail[: tail.find(stop)] + "\n"


def test_human_eval_and_mt_bench_rows_are_taken_as_they_are(generate, folders, tmp_path):
    file = write_rows(
        tmp_path / "rows.jsonl",
        {"task_id": "HumanEval/7", "prompt": "def f(", "entry_point": "f", "test": "assert f"},
        {"question_id": 81, "category": "writing", "turns": ["Say xs.", "Again."]},
        {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0.5, "stop_ids": [3]},
    )
    code, out, _ = generate("--prompts", file, *folders.options(), *SHORT, "--json")
    rows = objects(out)
    assert code == 0
    assert [row.get("name") for row in rows[:2]] == ["HumanEval/7", "MT-Bench/81"]
    assert [row.get("prompt") for row in rows[:3]] == ["def f(", "Say xs.", [5, 6, 7]]
    assert len(rows[2]["tokens"]) <= 2


CHAT_TEMPLATE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{{- 'reply' + (' ' ~ effort ~ thinking if effort is defined else '') + ': ' }}"""


def test_chat_sends_each_prompt_through_the_template(generate, broken):
    (broken.target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = Tokenizer(broken.target)
    options = [*broken.options(), *SHORT, "--chat"]
    code, out, err = generate(PROMPT, *options)
    assert code == 0
    assert out.startswith(f"{PROMPT}\n")
    assert "PyTorch" not in err
    _, text, _ = generate(PROMPT, *options, "--json")
    assert objects(text)[0]["prompt_tokens"] == tokenizer.encode(f"user: {PROMPT}\nreply: ")
    assert out == f"{PROMPT}\n{objects(text)[0]['text']}\n"


def test_chat_takes_a_system_message_and_template_options(generate, broken):
    (broken.target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    options = ["--chat", "--json", "--system", "Be brief.", "--chat-option", "effort=low"]
    options += ["--chat-option", "thinking=false", *broken.options("none"), *SHORT]
    code, out, _ = generate("a", "b", *options)
    assert code == 0
    tokenizer = Tokenizer(broken.target)
    for row, prompt in zip(objects(out), "ab", strict=False):
        text = f"system: Be brief.\nuser: {prompt}\nreply lowFalse: "
        assert row["prompt_tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "x"], "--system and --chat-option need --chat"),
        (["--chat-option", "x=1"], "--system and --chat-option need --chat"),
        (["--chat", "--chat-option", "x"], "'x' must be NAME=VALUE"),
        (["--chat", "--chat-option", "a b=1"], "'a b=1' must be NAME=VALUE"),
        (["--chat", "--system", "\udc80"], "not a valid Unicode string"),
    ],
)
def test_chat_mistakes_are_one_line(generate, broken, options, message):
    (broken.target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    code, _, err = generate(PROMPT, *broken.options("none"), *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_limit_takes_the_first_prompts(generate, folders, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    code, out, _ = generate("--prompts", file, "--limit", "2", *folders.options(), *SHORT, "--json")
    assert code == 0
    assert [row["prompt"] for row in objects(out)[:2]] == ["a", "b"]
    assert len(objects(out)) == 3


@pytest.mark.slow
def test_compare_shows_three_methods_and_finds_no_difference(generate, folders, tmp_path):
    """Of the prompts that can run."""
    prompts = "def f(x):", "def f(x): " * 200, "return"
    file = write_rows(tmp_path / "rows.jsonl", *({"prompt": text} for text in prompts))
    heads = [f"--drafter={folders.eagle3}", f"--drafter={folders.peagle}"]
    code, out, err = generate(
        "--compare",
        PROMPT,
        file,
        "--model",
        folders.target,
        *heads,
        *COMPARED,
        "--no-cache",
    )
    assert code == 3
    assert f"left out: {file}:2: prompt: " in err
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["plain", "EAGLE-3", "P-EAGLE"]
    assert "3 outputs are those of plain decoding (float32)" in out


@pytest.mark.slow
def test_compare_leaves_out_a_method_without_a_head(generate, folders):
    code, out, _ = generate("--compare", PROMPT, "xs", *folders.options(), *COMPARED, "--json")
    assert code == 0
    assert [row.get("method") for row in objects(out)] == ["none", "peagle", None]
    assert objects(out)[-1] == {"dtype": "float32", "identical": True, "left_out": []}


@pytest.mark.exhaustive
def test_compare_fails_and_names_the_place_where_an_output_differs(generate, folders, monkeypatch):
    run = runs.run

    def tampering(engine, *args, **kwargs):
        result = run(engine, *args, **kwargs)
        if engine.config.num_draft:
            tokens = result.completions[0].tokens
            tokens[5] = (tokens[5] + 1) % 280
        return result

    monkeypatch.setattr(runs, "run", tampering)
    code, out, err = generate("--compare", PROMPT, "xs", *folders.options(), *SHORT)
    assert code == 1
    assert "P-EAGLE differs from plain decoding: prompt 1, output token 5" in err
    assert "are those of plain" not in out


@pytest.mark.slow
def test_an_interrupt_ends_with_130_and_no_traceback(folders):
    argv = [PROMPT, *folders.options(), "--max-tokens", "100000", "--max-model-len", "250"]
    # At a high temperature the end token is unlikely, so many prompts keep the command busy.
    command = [sys.executable, "-m", "peagle_jax", *argv, *(["xs"] * 400), "--temperature", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    process.stdout.readline()  # the first block is there
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err


@pytest.mark.slow
def test_a_head_says_itself_how_it_is_run(generate, folders):
    where = ["--model", folders.target, "--drafter", folders.eagle3]
    code, out, _ = generate(PROMPT, *where, *SHORT, "--json", "--no-cache")
    assert code == 0
    assert objects(out)[-1]["summary"]["method"] == "eagle3"


@pytest.mark.slow
def test_the_embedded_model_needs_no_options(generate):
    code, out, err = generate(PROMPT, "--max-tokens", "32", "--no-cache")
    assert code == 0
    assert out.startswith(PROMPT)
    assert "P-EAGLE K=7: acceptance length" in err
