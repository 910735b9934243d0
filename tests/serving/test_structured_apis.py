"""Constraints on every interface: HTTP, both gRPC services, the command line."""

import json
import re

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from serving.client import main as client_main
from serving.protos import peagle_v1_pb2
from tests.serving.live import LiveServer
from tests.vocabularies import BEGIN_THINK, END_THINK
from tests.waiting import LIMIT

PROPERTIES = {
    "on": {"type": "boolean"},
    "n": {"type": "integer", "maximum": 99, "minimum": 0},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["on", "n"]}
SCHEMA["additionalProperties"] = False
BAD_SCHEMA = {"type": "array", "uniqueItems": True}


@pytest.fixture(scope="module")
def live(make_json_engine):
    with LiveServer(make_json_engine(), http=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as made:
        yield made


def messages() -> list[dict]:
    return [{"role": "user", "content": "is it on?"}]


def valid(text: str) -> bool:
    content = json.loads(text)
    assert isinstance(content["on"], bool)
    assert 0 <= content["n"] <= 99
    return len(content) == 2


def of_format(**schema) -> dict:
    """`response_format` with the kind json_schema."""
    return dict(response_format={"type": "json_schema", "json_schema": schema})


def outputs(**fields) -> dict:
    return dict(structured_outputs=fields)


CONSTRAINTS = [
    (of_format(name="s", schema=SCHEMA), valid),
    (outputs(json=json.dumps(SCHEMA)), valid),
    (
        outputs(json=SCHEMA, disable_any_whitespace=True),
        lambda t: valid(t) and not re.search(r"\s", t),
    ),
    (outputs(json=SCHEMA, whitespace_pattern="[ ]?"), lambda t: valid(t) and "\n" not in t),
    (outputs(regex="[a-c]{2}-[0-9]"), re.compile("[a-c]{2}-[0-9]").fullmatch),
    (outputs(choice=["left", "right"]), ["left", "right"].__contains__),
    (outputs(grammar='root ::= "x" [0-9] "y"'), re.compile("x[0-9]y").fullmatch),
]


@pytest.mark.sampled(3, slow=2)
@pytest.mark.parametrize(("fields", "check"), CONSTRAINTS)
def test_completions_and_chats_obey(server, http, fields, check):
    begin = server.engine.tokenizer.added[BEGIN_THINK]  # a chat may reason up to its length
    body = dict(max_tokens=150, temperature=1, seed=1, n=2, logit_bias={str(begin): -100}) | fields
    answers = [
        http.post("/v1/completions", json=body | dict(prompt="say ")),
        http.post("/v1/chat/completions", json=body | dict(messages=messages())),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert choice["finish_reason"] == "stop"
            assert check(text.lstrip()), text


def test_reasoning_before_an_answer_is_free_in_chats_only(server, http):
    """A bias makes the markers likely; a completion may not contain them."""
    end = server.engine.tokenizer.added[END_THINK]
    begin = end - 1
    body = dict(max_tokens=150, temperature=1, seed=2, return_token_ids=True)
    body |= outputs(json=SCHEMA) | dict(logit_bias={str(begin): 50, str(end): 3})
    answer = http.post("/v1/chat/completions", json=body | dict(messages=messages()))
    assert answer.status_code == 200, answer.text
    chat = answer.json()
    ids = chat["choices"][0]["token_ids"]
    assert ids[0] == begin
    if chat["choices"][0]["finish_reason"] == "stop":
        answer = server.engine.tokenizer.decode(ids[ids.index(end) + 1 :])
        assert valid(answer)
    plain = http.post("/v1/completions", json=body | dict(prompt="say ")).json()["choices"][0]
    assert begin not in plain["token_ids"]
    assert plain["text"].startswith("{")


JSON_OBJECT = dict(response_format={"type": "json_object"})
OF_FORMAT = "response_format.json_schema"
REFUSED = [
    (dict(response_format={"type": "yaml"}), "response_format.type"),
    (JSON_OBJECT | dict(n=10**9, temperature=1), "n"),  # a matcher for each
    (dict(response_format={"type": "json_schema"}), OF_FORMAT),
    (of_format(name="x"), OF_FORMAT),
    (of_format(schema=5), f"{OF_FORMAT}.schema"),
    (of_format(schema=BAD_SCHEMA), f"{OF_FORMAT}.schema"),
    (outputs(json="{"), "structured_outputs.json"),
    (outputs(regex="(a"), "structured_outputs.regex"),
    (outputs(choice=[]), "structured_outputs.choice"),
    (outputs(choice=[1]), "structured_outputs.choice"),
    (outputs(grammar="?"), "structured_outputs.grammar"),
    (outputs(structural_tag="{}"), "structured_outputs.structural_tag"),
    (outputs(json={}, regex="a"), "structured_outputs.regex"),
    (outputs(json={}, whitespace_pattern="("), "structured_outputs.json"),
    (
        outputs(json={}, whitespace_pattern=" ", disable_any_whitespace=True),
        "structured_outputs.whitespace_pattern",
    ),
    (outputs(regex="a") | JSON_OBJECT, "structured_outputs.regex"),
    (outputs(regex="a") | dict(min_tokens=3), "min_tokens"),
    (dict(guided_json={}), "guided_json"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_is_no_constraint_is_refused_by_name(server, http, fields, field):
    for stream in (False, True):
        answer = http.post("/v1/completions", json=dict(prompt="a", stream=stream) | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert error["message"].startswith(f"{field}: ")
        assert "\n" not in error["message"]


def test_what_the_vocabulary_cannot_spell_is_the_clients_mistake(server, http):
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["a\u00fc"]}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "the constraint cannot be continued" in answer.json()["error"]["message"]


def test_no_constraint_is_no_constraint(server, http):
    body = dict(prompt="a", max_tokens=5, response_format={"type": "text"}, structured_outputs={})
    assert http.post("/v1/completions", json=body).status_code == 200


PEAGLE = [
    (dict(json_schema=json.dumps(SCHEMA)), valid),
    (dict(json_object=True), lambda text: text.startswith("{")),
    (dict(regex="[ab]{3}"), re.compile("[ab]{3}").fullmatch),
    (dict(grammar='start: "q" "r"?'), ["q", "qr"].__contains__),
]


@pytest.mark.parametrize(("fields", "check"), PEAGLE)
def test_peagles_service_obeys(server, fields, check):
    request = peagle_v1_pb2.GenerateRequest(
        text="say ",
        structured=peagle_v1_pb2.Structured(**fields),
        stopping=peagle_v1_pb2.Stopping(max_tokens=60),
        sampling=peagle_v1_pb2.Sampling(temperature=1, seed=1),
    )
    with server.peagle() as stub:
        answer = stub.GenerateOnce(request, timeout=LIMIT)
        assert check(answer.sequences[0].text)
        request.structured.choice.texts.extend(["only"])
        assert stub.GenerateOnce(request, timeout=LIMIT).sequences[0].text == "only"
        request.structured.regex = "(a"
        said = r"structured\.regex: .*not a regular expression: unclosed"
        with pytest.raises(grpc.RpcError, match=said):
            stub.GenerateOnce(request, timeout=LIMIT)


def test_vllms_service_obeys(server):
    sampling = vllm_engine_pb2.SamplingParams(
        json_schema=json.dumps(SCHEMA), max_tokens=60, seed=1, grammar_from_first_token=True
    )
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=[5, 6])
    request = vllm_engine_pb2.GenerateRequest(tokenized=tokens, sampling_params=sampling)
    with grpc.insecure_channel(server.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        (answer,) = stub.Generate(request, timeout=LIMIT)
        assert valid(server.engine.tokenizer.decode(answer.complete.output_ids))
        request.sampling_params.choice.choices.append("yes")
        (answer,) = stub.Generate(request, timeout=LIMIT)
        assert server.engine.tokenizer.decode(answer.complete.output_ids) == "yes"
        request.sampling_params.json_schema = json.dumps(BAD_SCHEMA)
        with pytest.raises(grpc.RpcError, match=r"sampling_params\.json_schema: .*uniqueItems"):
            list(stub.Generate(request, timeout=LIMIT))


def test_the_client_sends_constraints(server, capsys, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    address = ["--address", server.address]
    assert client_main([*address, "--json-schema", str(file), "say "]) == 0
    assert valid(capsys.readouterr().out)
    assert client_main([*address, "--choice", "a b", "--choice", "c", "say "]) == 0
    assert capsys.readouterr().out.strip() in ("a b", "c")
    file.write_text("{")
    assert client_main([*address, "--json-schema", str(file), "say "]) == 2
    assert "structured.json_schema: the schema is not JSON" in capsys.readouterr().err
    assert client_main([*address, "--json-object", "--regex", "a", "say "]) == 2
    assert "a text has one constraint" in capsys.readouterr().err
    assert client_main([*address, "--grammar", str(tmp_path / "none"), "say "]) == 2
    assert "none: No such file" in capsys.readouterr().err
