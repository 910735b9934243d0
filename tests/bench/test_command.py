"""The command line of peagle-bench: what --help shows, and options as dataclasses."""

import dataclasses
import shlex

import pytest

from bench.__main__ import check_out, main
from bench.commands import COMMANDS, GROUPS, parser
from bench.commands.decode_step import Options as DecodeStepOptions
from bench.commands.kernels import Options as KernelOptions
from peagle_jax.config import ConfigError


def parse(line: str):
    values = vars(parser().parse_args(shlex.split(line)))
    return COMMANDS[values["command"]].options.of(values)


def shown(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_command_with_its_example_by_group(capsys):
    text = shown(["--help"], capsys)
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for command in COMMANDS.values():
        assert f"\n  {command.name:<12}  {command.summary}\n" in text
        assert f"peagle-bench {command.examples[0]}\n" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_its_examples_and_every_option(name, capsys):
    text = shown([name, "--help"], capsys)
    for example in COMMANDS[name].examples:
        assert f"  peagle-bench {example}\n" in text
    for field in dataclasses.fields(COMMANDS[name].options):
        one = field.metadata.get("option")
        if one is not None and not one.positional:
            assert f"--{field.name.replace('_', '-')}" in text
            assert one.help.split()[0] in text


@pytest.mark.parametrize(
    ("name", "example"),
    [(command.name, line) for command in COMMANDS.values() for line in command.examples],
)
def test_examples_are_valid(name, example):
    options = parse(example.replace("\\\n", " "))
    assert type(options) is COMMANDS[name].options
    options.check()
    hash(options)


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
    assert parse("decode-step --preset llama-3.1-8b -K 3 7 --profile") == DecodeStepOptions(
        preset="llama-3.1-8b", k=(3, 7), profile=""
    )
    assert parse("kernels") == KernelOptions()
    assert parse("kernels --op moe --op block_gemm").op == ("moe", "block_gemm")
    assert parse("serve-load --goodput ttft:500 tpot:50").limits == {"ttft": 500.0, "tpot": 50.0}
    assert parse("hostile --no-together -- --max-num-seqs 4").serve_options == (
        "--max-num-seqs",
        "4",
    )
    assert not parse("hostile --no-together").together
    assert parse("hostile").together


def test_options_survive_json_as_lists():
    options = parse("decode-step --preset llama-3.1-8b --concurrency 1 8")
    assert DecodeStepOptions.of({"preset": "llama-3.1-8b", "concurrency": [1, 8]}) == options


def test_load_is_given_as_concurrency_or_rate(capsys):
    with pytest.raises(SystemExit):
        parse("serve-load --concurrency 1 --rate 4")
    assert "not allowed with" in capsys.readouterr().err


def test_rows_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, capsys):
    (file := tmp_path / "file").touch()
    for out in (file / "rows.jsonl", tmp_path):
        assert main(["acceptance", "--out", str(out)]) == 2
        assert f"--out {out}: cannot be written" in capsys.readouterr().err
    check_out(tmp_path / "new" / "rows.jsonl")
    check_out(file)


@pytest.mark.parametrize("command", ["decode-step", "lossless", "conversion new"])
def test_an_unknown_preset_is_refused_before_anything_runs(command):
    with pytest.raises(ConfigError, match="unknown preset 'gpt-9'"):
        parse(f"{command} --preset gpt-9").check()


def test_sampled_rounds_are_not_repeated_in_a_call():
    with pytest.raises(ConfigError, match="set --temperature 0"):
        parse("decode-step --preset qwen3-0.6b --rounds-per-call 2").check()
