"""`peagle-generate --batch`: OpenAI's batch form in, the server's answers out, and resumption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serving.http.batch import Batch
from tests.waiting import LIMIT, eventually

PROMPTS = {"a": "def quicksort(xs):", "b": "return xs", "c": "quick", "d": "xs # def"}
OPTIONS = ["-K", "3", "--adaptive", "off", "--concurrency", "2", "--max-model-len", "128"]


def line(custom_id: object, url: object = "/v1/completions", method="POST", **body) -> str:
    body = {"max_tokens": 12, "temperature": 0} | body
    return json.dumps(dict(custom_id=custom_id, method=method, url=url, body=body))


def good(name: str) -> str:
    return line(name, prompt=PROMPTS[name])


@pytest.fixture
def files(tmp_path) -> list[Path]:
    (tmp_path / "in.jsonl").write_text("\n".join(map(good, PROMPTS)) + "\n")
    return [tmp_path / "in.jsonl", tmp_path / "out.jsonl"]


@pytest.fixture
def batch(generate, folders, files):
    return lambda *more: generate("--batch", *files, *folders.options(), *OPTIONS, *more)


def answers(file: Path) -> dict[str | None, dict]:
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def text_of(row: dict) -> str:
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    return row["response"]["body"]["choices"][0]["text"]


def test_a_batch_has_the_texts_of_single_runs_and_goes_on_after_a_kill(
    batch, generate, folders, files
):
    code, out, err = batch()
    assert (code, out) == (0, "")
    assert "4 answered, 0 failed" in err
    found = answers(files[1])
    alone = ("--json", "--max-tokens", "12", "-K", "3")
    for name, prompt in PROMPTS.items():
        _, printed, _ = generate(prompt, *folders.options(), *alone)
        assert text_of(found[name]) == json.loads(printed.splitlines()[0])["text"]
        assert found[name]["response"]["request_id"]
    # As a kill leaves it: two lines, and a part of the third.
    lines = files[1].read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:2])
    files[1].write_bytes(kept + lines[2][:40])
    assert batch()[0] == 0
    assert files[1].read_bytes().startswith(kept)
    again = answers(files[1])
    assert {name: text_of(row) for name, row in again.items()} == {
        name: text_of(row) for name, row in found.items()
    }
    before = files[1].read_bytes()
    assert batch()[0] == 0
    assert files[1].read_bytes() == before


def test_bad_lines_have_errors_of_their_own_and_the_others_run(batch, files):
    rows = [
        good("a"),
        "{",
        good("a"),
        "",
        line("url", "/v1/embeddings", prompt="x"),
        line("get", method="GET", prompt="x"),
        line("stream", prompt="x", stream=True),
        line(7, prompt="x"),
        json.dumps(dict(custom_id="body", method="POST", url="/v1/completions", body=[])),
        line("refused", prompt="x", max_tokens=-1),
        line("chat", "/v1/chat/completions", messages=[dict(role="user", content="x")]),
        line("other", prompt="x", model="gpt-4"),
        good("b"),
    ]
    files[0].write_text("\n".join(rows))
    code, _, err = batch()
    assert code == 3
    assert "2 answered, 10 failed" in err
    found = [json.loads(row) for row in files[1].read_text().splitlines()]
    errors = {row["id"]: row["error"] for row in found if row["error"] is not None}
    assert {name: error["code"] for name, error in errors.items()} == {
        "batch_req_2": "invalid_json",
        "batch_req_3": "duplicate_custom_id",
        "batch_req_5": "invalid_url",
        "batch_req_6": "invalid_method",
        "batch_req_7": "invalid_body",
        "batch_req_8": "invalid_custom_id",
        "batch_req_9": "invalid_body",
    }
    assert "line 3: custom_id: 'a' is that of line 1" in errors["batch_req_3"]["message"]
    assert "/v1/embeddings" in errors["batch_req_5"]["message"]
    by_name = {row["custom_id"]: row for row in found if row["custom_id"] is not None}
    assert {text_of(by_name[name]) != "" for name in "ab"} == {True}
    status = {
        name: by_name[name]["response"]["status_code"] for name in ("refused", "chat", "other")
    }
    assert status == {"refused": 400, "chat": 400, "other": 404}
    assert "max_tokens" in by_name["refused"]["response"]["body"]["error"]["message"]
    before = files[1].read_bytes()
    code, _, err = batch()
    assert code == 3  # failures of the run before count
    assert "2 answered, 10 failed" in err
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("content", ["{}\n", "my notes", '{"id":"x"}\nabc\n'])
def test_a_file_that_holds_no_answers_is_left_alone(batch, files, content):
    files[1].write_text(content)
    code, _, err = batch()
    assert code == 2
    assert "no answer of a batch" in err
    assert files[1].read_text() == content


def test_files_that_cannot_be_used(generate, folders, files, tmp_path):
    for out, part in ((files[0], "holds the requests"), (tmp_path, "Is a directory")):
        code, _, err = generate("--batch", files[0], out, *folders.options())
        assert code == 2
        assert part in err


def test_a_full_disk_is_one_line_of_error(batch, files, monkeypatch):
    """Closing the file writes again what could not be written."""
    files[0].write_text(good("a"))
    run = Batch.run

    def run_on_a_full_disk(self, *arguments):
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), self._out.fileno())
        return run(self, *arguments)

    monkeypatch.setattr(Batch, "run", run_on_a_full_disk)
    code, _, err = batch()
    assert code == 2
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.endswith(f"error: {files[1]}: cannot be written (No space left on device)")


@pytest.mark.parametrize(
    "option", [["--temperature", "0.5"], ["--chat"], ["--json"], ["x"], ["--seed", "3"]]
)
def test_options_that_the_lines_have_are_refused(batch, option):
    code, _, err = batch(*option)
    assert code == 2
    assert "has no effect: the lines of --batch say it" in err


@pytest.mark.slow
def test_a_killed_process_leaves_a_file_that_a_second_run_completes(files, folders):
    files[0].write_text("\n".join(line(f"{i}", prompt="xs", max_tokens=100) for i in range(60)))
    command = [sys.executable, "-m", "peagle_jax", "--batch", *map(str, files)]
    command += [*folders.options(), *OPTIONS]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE)
    with process:
        eventually(lambda: files[1].exists() and files[1].stat().st_size, "an answer is there")
        busy = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert busy.returncode == 2
        assert "another run writes it" in busy.stderr
        process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert answers(files[1]).keys() == {f"{i}" for i in range(60)}
