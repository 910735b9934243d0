"""docs/serving.md is true: its client runs, its options and metrics exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from bench.__main__ import PROGRAM
from peagle_jax.cli.options import parser as generate_parser
from serving.client.options import parser as client_parser
from serving.settings import Settings
from serving.sources import parser as server_parser
from serving.sources import resolve
from tests.serving.test_deploy import smg_options

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text()
README = (ROOT / "README.md").read_text()
STRUCTURED = (ROOT / "docs" / "structured.md").read_text()


def blocks(language: str, text: str = TEXT) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for name, content in found if name == language]


def commands(program: str) -> list[tuple[list[str], dict[str, str]]]:
    """Its arguments and its environment, wherever a block shows it."""
    found = []
    for block in [*blocks(""), *blocks("", README), *blocks("", STRUCTURED)]:
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r"\s(?:[|]|&&)\s", line):
                if program in (words := shlex.split(command) if program in command else []):
                    place = words.index(program)
                    end = words.index("&") if "&" in words else None
                    if all("=" in word for word in words[:place]):  # else a text about the program
                        environment = dict(word.split("=", 1) for word in words[:place])
                        found.append((words[place + 1 : end], environment))
    return found


def test_the_client_of_the_page_runs(server):
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 22
    assert "127.0.0.1:50051" in code
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code.replace("127.0.0.1:50051", server.address), "serving.md", "exec"), {})
    assert re.search(r"^\d+ tokens, AL \d\.\d\d$", out.getvalue(), re.MULTILINE)
    assert "accepted by position: [" in out.getvalue()


def test_its_servers_can_be_started(tmp_path):
    (yaml,) = blocks("yaml")
    file = tmp_path / "server.yaml"
    file.write_text(yaml)
    shown = commands("peagle-serve")
    assert len(shown) >= 8
    for arguments, environment in shown:
        if "--help" in arguments:
            continue
        here = [str(file) if word == "server.yaml" else word for word in arguments]
        settings, sources = resolve(here, environment)
        assert isinstance(settings, Settings)
        if str(file) in here:
            assert sources["max_num_seqs"] == f"file {file}"


def test_its_gateway_can_be_started():
    (shown,) = commands("smg")
    assert shown[0][0] == "launch"
    urls = smg_options(shown[0][1:]).worker_urls
    started = [" ".join(arguments) for arguments, _ in commands("peagle-serve")]
    for url in urls:
        assert any(f"--port {url.rpartition(':')[2]} " in one for one in started)
    pinned = re.search(r'"(smg==[0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert pinned in TEXT


def test_every_option_that_is_named_exists():
    parsers = server_parser(), client_parser(), generate_parser()
    actions = [action for one in parsers for action in one._actions]
    options = {option for action in actions for option in action.option_strings}
    serve_load = PROGRAM.parser(["serve-load"])._subparsers._group_actions[0].choices["serve-load"]
    options |= {option for action in serve_load._actions for option in action.option_strings}
    options |= {"--worker-urls", "--build", "--tasks"}
    ours = re.sub(r"```\nvllm bench serve .*?```", "", TEXT, flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert named - options == set()


@pytest.mark.parametrize("kind", ["named and not there", "there and not named"])
def test_the_metrics_are_those_of_the_server(server, kind):
    text = server.call(server.frontend.metrics.text).decode()
    exported = {
        name
        for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        if not name.endswith("_created")
    }
    part = TEXT[TEXT.index("**Metrics**") : TEXT.index("AL over the last five minutes")]
    named = set(re.findall(r"`((?:vllm|peagle):\w+)`", part))
    assert (named - exported if kind == "named and not there" else exported - named) == set()
