"""Both sweeps on a tiny random model: the rows they write, and what a round's time is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench import rows
from bench.__main__ import main
from bench.sweep import prompt_set
from bench.timing import drive
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.structured import Structured
from peagle_jax.text.tokenizer import Tokenizer
from tests import tiny
from tests.programs import one_bucket

ENVIRONMENT = {"date", "device", "platform", "jax", "jaxlib", "flax", "python", "sha", "command"}


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(folders, out) -> list[str]:
    heads = ["--drafter", folders.eagle3, "--drafter", folders.peagle]
    fixed = ["--max-tokens", "8", "--max-model-len", "256", "--no-cache", "--sha", "abc"]
    return [str(item) for item in ["--model", folders.target, *heads, *fixed, "--out", out]]


@pytest.fixture
def few_prompts(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(3)))
    return f"few={file}"


@pytest.mark.slow
def test_throughput_compares_methods_at_every_concurrency(folders, tmp_path, few_prompts):
    out = tmp_path / "rows.jsonl"
    argv = [*options(folders, out), "-K", "2", "--concurrency", "1,2", "--set", few_prompts]
    assert main(["throughput", *argv, "--methods", "none,peagle"]) == 0
    measured = read(out)
    assert [(row["method"], row["concurrency"]) for row in measured] == [
        (method, c) for method in ("none", "peagle") for c in (1, 2)
    ]
    for row in measured:
        assert row.keys() >= ENVIRONMENT
        assert row["sha"] == "abc"
        assert row["tokens"] == sum(8 for _ in range(row["prompts"]))
        assert row["outputs_equal_to_plain"] == row["prompts"]
        emitted = row["tokens"] - row["prompts"]
        assert row["acceptance_length"] == pytest.approx(emitted / row["rounds"], 1e-3)
        assert 0 <= row["rounds"] + row["accepted"] - emitted <= row["prompts"]
        assert row["ms_per_round"] > 0
        assert row["ratio_to_plain"] > 0
    assert measured[0]["ratio_to_plain"] == 1


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("command", ["acceptance", "throughput", "lossless"])
def test_prompts_that_cannot_run_are_left_out_and_counted(
    folders, tmp_path, few_prompts, capsys, command
):
    file = Path(few_prompts.removeprefix("few="))
    file.write_text(json.dumps({"prompt": "def f(x): " * 300}) + "\n" + file.read_text())
    out = tmp_path / "rows.jsonl"
    own = {
        "acceptance": ["--sets", few_prompts, "--methods", "peagle"],
        "throughput": ["--set", few_prompts, "--methods", "none", "--concurrency", "1"],
        "lossless": [
            *("--set", few_prompts, "--methods", "none", "--concurrency", "1,2"),
            *("--tokens", "16"),
        ],
    }
    fixed = options(folders, out)
    if command == "lossless":  # sizes follow from the prompts
        place = fixed.index("--max-model-len")
        del fixed[place : place + 2]
    argv = [*fixed, "-K", "2", *own[command]]
    assert main([command, *argv]) == 3
    err = capsys.readouterr().err
    assert "peagle-bench: left out: few: prompt 1: prompt: " in err
    assert [row["prompts_left_out"] for row in read(out)] == [1]


@pytest.mark.slow
def test_requests_have_the_json_schema_of_a_file(
    folders, tmp_path, few_prompts, capsys, monkeypatch
):
    schema, out, seen = tmp_path / "yes.json", tmp_path / "rows.jsonl", []

    def unconstrained(
        engine, prompts, params, **options
    ):  # the engines of this folder have no masks
        seen.append(params.structured)
        return drive(engine, prompts, replace(params, structured=None), **options)

    monkeypatch.setattr("bench.acceptance.drive", unconstrained)
    argv = [*options(folders, out), "-K", "2", "--sets", few_prompts, "--methods", "peagle"]
    argv = ["acceptance", *argv, "--json-schema", str(schema)]
    assert main(argv) == 2
    assert str(schema) in capsys.readouterr().err
    schema.write_text('{"const": "yes"}')
    assert main(argv) == 0
    assert seen == [Structured.json_schema({"const": "yes"})]
    assert [row["set"] for row in read(out)] == ["few as yes"]


def test_drive_keeps_the_concurrency_and_times_full_rounds_only():
    config = EngineConfig(max_num_seqs=4, max_model_len=64)
    engine = one_bucket(Engine(tiny.target(**tiny.ONE_LAYER), None, config))
    most = []
    step = engine.step

    def watched():
        most.append(engine.scheduler.num_running + engine.scheduler.num_waiting)
        return step()

    engine.step = watched
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    measured = drive(engine, [[i, i] for i in range(1, 6)], params, concurrency=2)
    assert max(most) == 2
    assert [len(output) for output in measured.outputs] == [12] * 5
    assert 0 < measured.timed_rounds < 5 * 12
    assert 0 < measured.ms_per_round < 1e3 * measured.seconds


def test_text_is_cut_into_prompts_with_gaps(folders, tmp_path):
    tokenizer = Tokenizer(folders.target)
    file = tmp_path / "text.py"
    file.write_text("def quicksort(xs): return xs\n" * 30)
    tokens = tokenizer.encode(file.read_text())
    name, prompts = prompt_set(f"held-out={file}", tokenizer, prompt_tokens=10, limit=None)
    assert name == "held-out"
    assert prompts[:2] == [tokens[:10], tokens[20:30]]
    _, few = prompt_set(f"held-out={file}", tokenizer, prompt_tokens=10, limit=3)
    assert len(few) == 3
    assert few[1] == prompts[len(prompts) // 3]


def test_the_shipped_prompt_sets_are_whole():
    for name, size in (("HumanEval", 164), ("MT-Bench", 80)):
        assert len(prompt_set(name, None, prompt_tokens=1, limit=None)[1]) == size


@pytest.mark.parametrize("argv", [[], ["throughput", "--methods", "magic"], ["report"]])
def test_mistakes_are_one_line_and_exit_code_2(capsys, argv):
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("peagle-bench")
    assert err.count("\n") == 1


def test_rows_know_where_they_were_measured(monkeypatch):
    known = rows.environment("1234")
    assert known.keys() == ENVIRONMENT
    assert known["sha"] == "1234"
    monkeypatch.setenv("PATH", "")
    assert rows.git_sha() == "unknown"


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("command", "sets"), [("throughput", "--set"), ("acceptance", "--sets")])
def test_prompts_go_through_a_models_template_and_a_row_of_no_round_is_an_error(
    folders, tmp_path, few_prompts, capsys, command, sets
):
    target = tmp_path / "target"
    shutil.copytree(folders.target, target)
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE)
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    argv = [command, *options(folders, tmp_path / "rows.jsonl"), sets, few_prompts, "-K", "2"]
    argv[argv.index("--model") + 1] = str(target)
    argv += ["--methods", "peagle", "--concurrency", "1"]
    seen = []
    original = Engine.add_request

    def add_request(engine, prompt, *given, **named):
        seen.append(prompt if isinstance(prompt, str) else Tokenizer(target).decode(prompt))
        return original(engine, prompt, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "add_request", add_request)
        assert main([*argv, "--ignore-eos"]) == 0
        assert "<user>def f0(x):<assistant>" in seen
        assert read(tmp_path / "rows.jsonl")[-1]["chat"] is True
        seen.clear()
        assert main([*argv, "--no-chat", "--max-tokens", "1"]) == 2
        assert "def f0(x):" in seen
    assert "no round was measured" in capsys.readouterr().err
    assert len(read(tmp_path / "rows.jsonl")) == 1
