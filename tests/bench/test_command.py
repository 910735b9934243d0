"""The command line of peagle-bench: what --help shows, and options as dataclasses."""

import dataclasses
import re
import shlex

import pytest

from bench.__main__ import PROGRAM, main
from bench.command import check_out
from bench.decode_step import Options as DecodeStepOptions
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.options import options_of
from peagle_jax.sampling_params import SamplingParams


def parse(line: str):
    return PROGRAM.parse(shlex.split(line))[1]


def shown(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as end:
        PROGRAM.parser(argv[:1]).parse_args(argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_command(capsys):
    text = shown(["--help"], capsys)
    for name, summary in PROGRAM.commands.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_help_of_a_command_shows_its_examples_and_every_option(name, capsys):
    text = shown([name, "--help"], capsys)
    command = PROGRAM.load(name)
    for example in command.examples:
        assert f"  peagle-bench {example}\n" in text
    for field in dataclasses.fields(command.options):
        if not field.metadata.get("positional"):
            assert f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_examples_are_valid(name):
    for example in PROGRAM.load(name).examples:
        options = parse(example.replace("\\\n", " "))
        options.check()
        hash(options)


@pytest.mark.parametrize(
    ("owner", "name", "values"),
    [
        (EngineConfig, "activations", "{bf16,fp8}"),
        (EngineConfig, "max_model_len", "N"),
        (SamplingParams, "temperature", "X"),
    ],
)
def test_an_option_of_engines_or_requests_is_the_products(owner, name, values, capsys):
    text = " ".join(shown(["throughput", "--help"], capsys).split())
    one = options_of(owner)[name]
    assert f"--{one.flag} {values} {one.help} (default: " in text


@pytest.mark.parametrize(
    "command", ["decode-step --preset llama-3.1-8b", "throughput", "acceptance"]
)
@pytest.mark.parametrize("typed", ["3,7", "3 7", "7 3", "3,7 3"])
def test_lists_have_commas_or_spaces_between_their_numbers(command, typed):
    assert parse(f"{command} -K {typed}").k == (3, 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("throughput -K many", "'many' must be a whole number"),
        ("throughput -K 3,,7", "'' must be a whole number"),
        ("decode-step --preset llama-3.1-8b --method eagle", "unknown method 'eagle'"),
        ("throughput --concurrency 0", "0 is not positive"),
    ],
)
def test_a_wrong_list_is_refused_by_its_wrong_item(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(line)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_options_are_typed_and_have_their_defaults():
    assert parse("decode-step --preset llama-3.1-8b -K 3 7") == DecodeStepOptions(
        preset="llama-3.1-8b", k=(3, 7)
    )
    assert parse("serve-load --preset qwen3-0.6b --rate 4,8").rate == (4.0, 8.0)


def test_rows_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, capsys):
    (file := tmp_path / "file").touch()
    for out in (file / "rows.jsonl", tmp_path):
        assert main(["acceptance", "--out", str(out)]) == 2
        assert f"--out {out}: cannot be written" in capsys.readouterr().err
    check_out(tmp_path / "new" / "rows.jsonl")
    check_out(file)


@pytest.mark.parametrize("command", ["decode-step", "lossless"])
def test_an_unknown_preset_is_refused_before_anything_runs(command):
    with pytest.raises(ConfigError, match="unknown preset 'gpt-9'"):
        parse(f"{command} --preset gpt-9").check()


def test_a_removed_command_says_where_it_is(capsys):
    for name, where in (("hostile", "python -m lab"), ("headroom", "lab/log.md")):
        assert main([name, "--any"]) == 2
        assert where in capsys.readouterr().err
