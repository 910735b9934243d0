"""The example agent of the docs edits a file; the model's replies are given."""

import json
import sys

import pytest

from peagle_jax.cli.loading import load
from tests.programs import OneBucketConfig
from tests.serving.live import LiveServer
from tests.serving.scripted import Script
from tests.test_house import ROOT


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    sys.modules.pop("agent", None)
    import agent

    return agent


@pytest.fixture
def scripted():
    """A server of the embedded model, whose replies have the format of Qwen3."""
    config = OneBucketConfig(num_draft=0, max_num_seqs=2, max_model_len=512, prefill_chunk=64)
    engine = load(method="none", config=config)
    end = engine.target_config.eos_ids[0]
    script = Script(engine, [])

    def say(*replies: str) -> None:
        script.replies[:] = [[*engine.tokenizer.encode(one), end] for one in replies]

    server = LiveServer(engine, http=True, name="embedded", reply_format="qwen3")
    yield server, say
    server.close()


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=arguments))}\n</tool_call>"


@pytest.mark.slow
def test_the_agent_reads_edits_and_answers(agent, scripted, tmp_path):
    server, say = scripted
    path = tmp_path / "sort.py"
    path.write_text("def f(xs):\n    return sorted(xs)\n")
    say(
        "<think>I look first.</think>" + call("read"),
        call("replace", old="sorted(ys)", new="xs"),  # a mistake, which the agent reports
        call("replace", old="def f(", new="def sort(") + call("shout"),
        "The function is now called sort.",
    )
    with server.openai() as client:
        answer = agent.edit(client, "embedded", path, "Rename f to sort.")
        assert answer == "The function is now called sort."
        assert path.read_text() == "def sort(xs):\n    return sorted(xs)\n"
        say(call("read"))
        assert "after 2 turns" in agent.edit(client, "embedded", path, "Wait.", turns=2)
    server.check_empty()
