"""`peagle-client` against a live server: arguments, output and exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from peagle_jax import SamplingParams
from peagle_jax.engine.host.stats import Acceptance
from serving.client import main
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

PROMPT = "hello there"


@pytest.fixture
def ask(server, capsys):
    """Runs the command in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str):
        try:
            code = main(["--address", server.address, *arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        return code, *capsys.readouterr()

    return run


def start(server, *arguments: str, **options) -> subprocess.Popen:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "serving.client", "--address", server.address, *arguments]
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, text=True, **streams | options)


def test_statistics_follow_the_streamed_text(ask, make_engine):
    expected = make_engine().generate([PROMPT], SamplingParams(max_tokens=30))[0]
    code, out, err = ask(PROMPT, "--max-tokens", "30")
    assert (code, out) == (0, expected.text + "\n")
    assert f"({len(expected.tokens)} tokens in " in err
    assert f"over {expected.rounds} rounds" in err
    rates = [f"{rate:.2f}" for rate in Acceptance.of([expected]).rates]
    assert err.endswith(f"accepted at position 1, 2, ...: {' '.join(rates)}\n")


def test_json_has_all_fields(ask, make_engine):
    expected = make_engine().generate([PROMPT], SamplingParams(max_tokens=9, logprobs=2))[0]
    code, out, err = ask(PROMPT, "--max-tokens", "9", "--json", "--logprobs", "2")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["request_id"]
    (sequence,) = answer["sequences"]
    assert (sequence["token_ids"], sequence["text"]) == (expected.tokens, expected.text)
    assert sequence["finish_reason"] == expected.finish_reason == "length"
    assert [len(one["alternatives"]) for one in sequence["logprobs"]] == [2] * 9
    assert answer["usage"]["rounds"] == expected.rounds
    assert answer["usage"]["accepted_per_position"] == expected.accepted_per_position
    assert answer["usage"]["drafted_per_position"] == expected.drafted_per_position


def test_allowed_tokens_reach_the_engine(ask):
    options = ["--max-tokens", "6", "--json", "--allowed-token", "5", "--allowed-token", "9"]
    _, out, _ = ask(PROMPT, *options)
    assert set(json.loads(out)["sequences"][0]["token_ids"]) <= {5, 9}


def test_several_sequences_are_written_in_order(ask):
    options = ("--temperature", "1", "--seed", "3", "--max-tokens", "12", "--ignore-eos")
    code, out, err = ask(PROMPT, "--n", "3", *options)
    assert (code, out.count("=== ")) == (0, 3)
    assert "(36 tokens in" in err
    assert out.startswith(f"=== 1 of 3\n{ask(PROMPT, *options)[1]}=== 2 of 3\n")


def test_chat_applies_the_template(ask):
    options = ("--max-tokens", "12")
    _, spelled, _ = ask("system:be brief\nuser:ab\n", *options)
    assert ask("ab", "--chat", "--system", "be brief", *options)[:2] == (0, spelled)


def test_a_prompt_is_read_from_a_pipe(server, ask):
    _, expected, _ = ask("ab\ncd", "--max-tokens", "5")
    process = start(server, "--max-tokens", "5", stdin=subprocess.PIPE)
    out, _ = process.communicate("ab\ncd", timeout=LIMIT)
    assert (process.returncode, out) == (0, expected)


def test_a_turn_follows_the_earlier_ones(server, ask):
    options = ("--chat", "--max-tokens", "4", "--ignore-eos")
    _, first, _ = ask("ab", *options)
    spelled = f"user:ab\nassistant:{first[:-1]}\nuser:cd\n"
    _, second, _ = ask(spelled, "--max-tokens", "4", "--ignore-eos")
    ours, theirs = pty.openpty()
    process = start(server, *options, stdin=theirs)
    os.write(ours, b"ab\n\ncd\n\x04")  # an empty line is skipped; Ctrl-D ends the conversation
    out, err = process.communicate(timeout=LIMIT)
    os.close(ours), os.close(theirs)
    assert (process.returncode, out) == (0, first + second)
    assert err.count("tokens/s") == 2


def test_a_failed_turn_is_not_part_of_the_conversation(server, ask):
    options = ("--chat", "--max-tokens", "4", "--ignore-eos")
    _, first, _ = ask("ab", *options)
    ours, theirs = pty.openpty()
    process = start(server, *options, stdin=theirs)
    os.write(ours, b"x" * 120 + b"\nab\n\x04")
    out, err = process.communicate(timeout=LIMIT)
    os.close(ours), os.close(theirs)
    assert (process.returncode, out) == (0, first)
    assert "leave no room" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--temperature -1", "temperature=-1.0 must be between 0 and 100"),
        ("--n 2", "greedy sequences would be equal"),
        ("--n 0", "--n must be at least 1"),
        ("--priority 99999999999", "cannot be sent"),
        ("--allowed-token 5 --allowed-token -5", "--allowed-token-ids cannot be sent"),
        ("--logit-bias=-5=1", "--logit-bias cannot be sent"),
        ("--chat --system \udcff", "cannot be sent"),
        ("--system b", "need --chat"),
        ("--info", "take no PROMPT"),
        ("--tls-cert x", "belong together"),
        ("-K 9", "more than the 3 that the engine was compiled for"),
    ],
)
def test_bad_input_is_one_line_and_code_2(ask, arguments, word):
    code, out, err = ask("a", *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("peagle-client: error: ")
    assert word in err
    assert err.count("\n") == 1


class Reasoner(peagle_v1_pb2_grpc.GenerationServicer):
    """Emits reasoning before text, as a model with channels does."""

    def Generate(self, request, context):
        finish, usage = pb.Finish(reason=pb.FINISH_REASON_STOP), pb.Usage(completion_tokens=4)
        for index in range(request.n):
            yield pb.GenerateDelta(index=index, reasoning="They ")
            yield pb.GenerateDelta(index=index, reasoning="greet.", text="Hi")
            yield pb.GenerateDelta(index=index, text="!", finish=finish, usage=usage)


def test_reasoning_is_no_part_of_the_text(capsys):
    other = grpc.server(ThreadPoolExecutor(1))
    peagle_v1_pb2_grpc.add_GenerationServicer_to_server(Reasoner(), other)
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    command = ["--address", f"127.0.0.1:{port}", "--chat", "hello"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert (out, err[: err.index("--")]) == ("Hi!\n", "They greet.\n")
    assert main([*command, "--n", "2"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.count("They greet.\n")) == ("=== 1 of 2\nHi!\n=== 2 of 2\nHi!\n", 2)
    assert main([*command, "--json"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
    assert (sequence["text"], sequence["reasoning"]) == ("Hi!", "They greet.")
    other.stop(None).wait()


def test_an_address_without_a_server_is_named(capsys):
    assert main(["--address", "127.0.0.1:1", "a"]) == 3
    assert "is peagle-serve running there" in capsys.readouterr().err


def test_another_kind_of_server_is_named(capsys):
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    assert main(["--address", f"127.0.0.1:{port}", "a"]) == 1
    assert "is no peagle-serve" in capsys.readouterr().err
    other.stop(None).wait()


def test_a_timeout_has_its_own_exit_code(ask, pace):
    code, _, err = ask("a", "--timeout", "0.5", "--ignore-eos")
    assert code == 4
    assert "time" in err


def test_info_and_health(ask):
    code, out, _ = ask("--info")
    info = json.loads(out)
    assert (code, info["model"]["name"], info["stats"]["state"]) == (0, "tiny", "serving")
    assert info["stats"]["num_running"] == 0
    assert info["stats"]["acceptance"]["rounds"] >= 0
    assert info["model"]["eos_token_ids"] == [126, 127]
    assert ask("--health")[:2] == (0, "SERVING\n")


def test_health_of_a_stopped_server_is_an_exit_code(make_engine, capsys):
    server = LiveServer(make_engine())
    server.run(server.frontend.drain(1.0))
    server.call(server.server.show, server.frontend.state)
    assert main(["--address", server.address, "--health"]) == 3
    assert capsys.readouterr().out == "NOT_SERVING\n"
    assert main(["--address", server.address, "a"]) == 3
    assert "the engine is stopped" in capsys.readouterr().err
    server.close()


def test_an_interrupt_ends_the_command_and_its_request(server, pace):
    pace.release(3)
    process = start(server, "a", "--ignore-eos")
    assert process.stdout.read(1)
    assert server.call(lambda: server.frontend.num_open) == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    eventually(lambda: server.frontend.num_open == 0)
    assert (process.returncode, err.strip()) == (130, "peagle-client: interrupted")


def test_ctrl_c_in_a_conversation_ends_only_the_answer(server, pace):
    pace.release(3)
    ours, theirs = pty.openpty()
    process = start(server, "--chat", "--ignore-eos", stdin=theirs)
    os.write(ours, b"ab\n")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    eventually(lambda: server.frontend.num_open == 0)
    assert process.poll() is None
    os.write(ours, b"\x04")
    _, err = process.communicate(timeout=LIMIT)
    os.close(ours), os.close(theirs)
    assert (process.returncode, err.count("this turn is dropped")) == (0, 1), err


def test_a_closed_pipe_ends_the_request(server, pace):
    pace.release(3)
    process = start(server, "a", "--ignore-eos")
    assert process.stdout.read(1)
    process.stdout.close()
    pace.release(1_000_000)
    assert process.wait(LIMIT) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_the_client_starts_without_what_a_server_needs():
    code = "import sys, serving.client.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    large = {"jax", "numpy", "flax", "yaml", "transformers", "pydantic"}
    assert large.isdisjoint(done.stdout.split())
