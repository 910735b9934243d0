"""A prompt of a file that cannot run is skipped, the others run, and the exit code is 3."""

import json

import pytest

GOOD = {"prompt": "def quicksort(xs):", "max_tokens": 4}
ALSO = {"prompt": [5, 6, 7], "max_tokens": 4}
LONG = {"prompt": "def f(x): " * 200}
FOREIGN = {"prompt": [5, 100_000]}
GREEDY = {"prompt": [5, 6], "num_speculative_tokens": 9}


@pytest.fixture
def file_of(tmp_path):
    def write(*rows: dict) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def left_out(err: str) -> list[str]:
    begin = "peagle-generate: left out: "
    return [line.removeprefix(begin) for line in err.splitlines() if line.startswith(begin)]


def test_bad_prompts_are_named_and_the_others_run(generate, folders, file_of):
    path = file_of(GOOD, LONG, FOREIGN, ALSO, GREEDY)
    argv = [*folders.options(), "-K", "3", "--concurrency", "2", "--adaptive", "off"]
    code, out, err = generate("--prompts", path, *argv, "--json")
    assert code == 3
    lines = left_out(err)
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{path}:2", "prompt"],
        [f"{path}:3", "prompt"],
        [f"{path}:5", "num_speculative_tokens"],
    ]
    assert "leave no room for output: prompt and output may have 256" in lines[0]
    *done, summary = [json.loads(line) for line in out.splitlines()]
    assert [one["name"] for one in done] == [f"{path}:1", f"{path}:4"]
    assert [len(one["tokens"]) for one in done] == [4, 4]
    assert summary["summary"]["left_out"] == lines
    assert summary["summary"]["prompts"] == 2


def test_without_any_good_prompt_the_first_reason_is_the_error(generate, folders, file_of):
    path = file_of(LONG, FOREIGN)
    code, out, err = generate("--prompts", path, *folders.options())
    assert (code, out) == (2, "")
    assert err.startswith(f"peagle-generate: error: {path}:1: prompt: ")
    assert err.count("\n") == 1


def test_a_text_that_fails_is_named_and_the_others_are_whole(
    generate, folders, file_of, monkeypatch
):
    """Its logits are not finite: an embedding of NaN for one token."""
    import jax.numpy as jnp

    from peagle_jax.cli import loading

    load = loading.load

    def poisoned(*args, **options):
        engine = load(*args, **options)
        weights = engine.programs._weights
        sizes = [leaf.shape[0] for leaf in weights]
        index = sizes.index(engine.target_config.vocab_size)  # the embedding stands before the head
        engine.programs._weights[index] = weights[index].at[5].set(jnp.nan)
        return engine

    monkeypatch.setattr(loading, "load", poisoned)
    path = file_of(GOOD, {"prompt": [9, 5, 7], "max_tokens": 4})
    code, out, err = generate("--prompts", path, *folders.options("none"), "--json")
    assert code == 3
    assert f"peagle-generate: failed: {path}:2: the model's logits are not finite" in err
    good, bad, _ = [json.loads(line) for line in out.splitlines()]
    assert (good["finish_reason"], good["error"]) == ("length", None)
    assert bad["finish_reason"] == "error"
    assert bad["error"].startswith("the model's logits are not finite")
