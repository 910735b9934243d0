"""Every mistake of a user is one line on stderr and exit code 2, before anything is generated."""

import json
import os

import pytest

PROMPT = "def f(x):"


def refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2, (out, err)
    assert out == ""
    assert err.startswith("peagle-generate: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in parts:
        assert part in err


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["give a PROMPT"]),
        ([""], ["prompt 1", "empty"]),
        (["x", ""], ["prompt 2", "empty"]),
        (["x", "--method", "magic"], ["--method", "magic"]),
        (["x", "-K", "33"], ["num_draft=33 (num_speculative_tokens)", "32"]),
        (["x", "-K", "3,7"], ["'3,7' must be a whole number"]),
        (["x", "--max-tokens", "0"], ["max_tokens=0"]),
        (["x", "--temperature", "nan"], ["temperature=nan"]),
        (["x", "--top-p", "0"], ["top_p=0.0"]),
        (["x", "--seed", "-1"], ["seed=-1"]),
        (["x", "--stop", ""], ["stop="]),
        (["x", "--logprobs", "-1"], ["logprobs=-1"]),
        (["x", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["x", "--method", "none", "--draft-sampling", "sample"], ["no effect", "--method none"]),
        (["x", "--method", "none", "--adaptive", "load"], ["no effect", "--method none"]),
        (
            ["--compare", "y", "--draft-sampling", "sample", "--verify-method", "token"],
            ["no effect", "--compare is greedy"],
        ),
        (["x", "--concurrency", "0"], ["--concurrency 0"]),
        (["x", "--limit", "0"], ["--limit 0"]),
        (["x", "--compare", "y"], ["--compare"]),
        (["--compare", ""], ["empty"]),
        (["--compare", "nowhere.jsonl"], ["nowhere.jsonl", "cannot be read"]),
        (["--prompts", "nowhere.jsonl"], ["nowhere.jsonl", "cannot be read"]),
    ],
)
def test_arguments_that_make_no_sense(generate, argv, parts):
    refused(generate(*argv), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            b'{"prompt": "a"}\n{"prompt": "b", "max_token": 3}\n',
            [":2", "'max_token'", "max_tokens"],
        ),
        (b'{"prompt": "a"}\n\n{"prompt": \n', [":3", "not JSON"]),
        (b"[" * 100_000 + b"\n", [":1", "not JSON"]),
        (b"[1, 2]\n", [":1", "JSON object"]),
        (b'{"prompt": ""}\n', [":1", "empty"]),
        (b'{"prompt": ["a"]}\n', [":1", "token ids"]),
        (b'{"prompt": "\\ud800"}\n', [":1", "Unicode"]),
        (b'{"text": "a"}\n', [":1", "'text'"]),
        (b'{"max_tokens": 3}\n', [":1", "no prompt"]),
        (b'{"question_id": 81, "turns": []}\n', [":1", "no prompt"]),
        (b'{"prompt": "a", "max_tokens": "3"}\n', [":1", "max_tokens='3'", "whole number"]),
        (b'{"prompt": "a", "seed": true}\n', [":1", "seed=True"]),
        (b'{"prompt": "a", "stop": [3]}\n', [":1", "stop=[3]"]),
        (b'{"prompt": "a", "temperature": null}\n', [":1", "temperature=None"]),
        (b"\xff\xfe\n", ["UTF-8"]),
        (b"\n", ["no prompts"]),
    ],
)
def test_rows_that_make_no_sense(generate, tmp_path, content, parts):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    refused(generate("--prompts", file), "rows.jsonl", *parts)


def test_a_folder_is_no_prompt_file(generate, tmp_path):
    refused(generate("--prompts", tmp_path), "cannot be read")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_prompt_file(generate, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    file.chmod(0)
    refused(generate("--prompts", file), "cannot be read")


def test_compare_takes_one_head_for_each_method(generate, folders):
    extra = ["--drafter", folders.peagle]
    refused(generate("--compare", PROMPT, *folders.options(), *extra), "second peagle head")


def test_a_head_of_the_other_method(generate, folders):
    head = ["--drafter", folders.eagle3, "--method", "peagle"]
    refused(generate(PROMPT, "--model", folders.target, *head, "--no-cache"), "--method eagle3")


def test_a_wrong_constraint_is_refused_before_anything_is_printed(generate, folders):
    wrong = [*folders.options(), "--regex", "("]
    refused(generate(PROMPT, *wrong), "the constraint of the output")


def truncate(broken):
    path = broken.target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BREAKS = {
    "no folder": (lambda b: b.target.rename(b.target.with_name("gone")), ["target"]),
    "other family": (lambda b: edit_config(b.target, model_type="mamba"), ["mamba"]),
    "truncated": (truncate, ["model.safetensors", "truncated"]),
    "broken tokenizer": (lambda b: (b.target / "tokenizer.json").write_text("{}"), ["tokenizer"]),
    "no head": (lambda b: b.peagle.rename(b.peagle.with_name("gone")), ["peagle"]),
    "no mask id": (lambda b: edit_config(b.peagle, ptd_token_id=None), ["mask token id"]),
}


@pytest.mark.parametrize("what", BREAKS)
def test_broken_folders(generate, broken, what):
    damage, parts = BREAKS[what]
    damage(broken)
    refused(generate(PROMPT, *broken.options()), *parts)


def test_a_model_without_a_tokenizer_takes_token_ids_only(generate, broken, tmp_path):
    (broken.target / "tokenizer.json").unlink()
    refused(generate(PROMPT, *broken.options("none")), "token ids")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [5, 6]}\n')
    few = ["--max-tokens", "3"]
    code, out, _ = generate("--prompts", file, *broken.options("none"), *few)
    assert code == 0
    assert len(out.split()) == 3


def test_chat_without_a_template(generate, folders):
    refused(generate(PROMPT, *folders.options("none"), "--chat"), "chat template")


def test_a_device_that_is_out_of_memory_is_one_line(generate, folders, monkeypatch):
    def full(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr("peagle_jax.devices.init_state", full)
    refused(generate(PROMPT, *folders.options()), "out of memory", "--concurrency")
