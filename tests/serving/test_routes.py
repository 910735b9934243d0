"""Routes beside generation: origins, slashes, documentation, probes, counts."""

import httpx
import jsonschema
import pytest

from peagle_jax.config import ConfigError
from serving.settings import Settings
from tests.waiting import LIMIT

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = "access-control-allow-origin"
OURS, FOREIGN = {"origin": "https://chat.example"}, {"origin": "https://evil.example"}


@pytest.fixture
def shared_origin(server):
    """A client of a server with a token that pages of one origin may use."""
    origins = Settings(allowed_origins="https://Chat.example , http://localhost:3000").origins
    with server.another_client(allowed_origins=origins, tokens=[b"sesame"]) as client:
        yield client


def test_pages_of_an_allowed_origin_may_use_the_server(shared_origin):
    path = "/v1/chat/completions"
    asked = shared_origin.options(path, headers=OURS | PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == OURS["origin"]
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    # A page may read why it is refused.
    assert shared_origin.post(path, json=CHAT, headers=OURS).headers[ALLOWED] == OURS["origin"]
    known = OURS | {"authorization": "Bearer sesame"}
    with shared_origin.stream("POST", path, json=CHAT | {"stream": True}, headers=known) as answer:
        assert answer.status_code == 200
        assert answer.headers[ALLOWED] == OURS["origin"]
        assert answer.headers["access-control-expose-headers"]
        assert "[DONE]" in answer.read().decode()


def test_pages_of_other_origins_may_not(shared_origin, http):
    path = "/v1/chat/completions"
    asked = shared_origin.options(path, headers=FOREIGN | PREFLIGHT)
    assert (asked.status_code, ALLOWED in asked.headers) == (400, False)
    known = FOREIGN | {"authorization": "Bearer sesame"}
    assert ALLOWED not in shared_origin.get("/v1/models", headers=known).headers
    assert http.options(path, headers=OURS | PREFLIGHT).status_code == 405  # the default
    assert ALLOWED not in http.get("/v1/models", headers=OURS).headers


def test_origins_are_checked():
    assert Settings().origins == []
    assert Settings(allowed_origins="*").origins == ["*"]
    for wrong in ("chat.example", "https://chat.example/", "https://a.example,", "https://a b"):
        with pytest.raises(ConfigError, match="must be an origin"):
            Settings(allowed_origins=wrong)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/health", "/metrics", "/version"]
)
def test_a_slash_at_the_end_changes_nothing(http, path):
    answers = [http.get(one) for one in (path, f"{path}/")]
    assert [one.status_code for one in answers] == [200, 200]
    if path.startswith("/v1"):
        assert answers[0].json() == answers[1].json()


def test_posts_may_end_in_a_slash_too(http):
    assert http.post("/v1/chat/completions/", json=CHAT).status_code == 200
    assert http.post("/v1/none/", json=CHAT).status_code == 404
    for path in ("//", "//evil.example/", "/page"):
        # Neither absolute nor to another server.
        assert http.get(path).headers.get("location", "page/") == "page/"


def test_probes_of_other_servers(http):
    assert http.get("/ping").json() == {"status": "serving", "paused": False}
    assert http.post("/ping").status_code == 200


def test_the_tokenizer_is_described(http, tokenizer):
    found = http.get("/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert found["chat_template"] == tokenizer.template_source


def test_tokens_of_a_response_are_counted(http, live):
    with live.openai() as client:
        counted = client.responses.input_tokens.count(model="tiny", input="hello there")
        answer = client.responses.create(model="tiny", input="hello there", max_output_tokens=2)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == answer.usage.input_tokens


def test_the_documentation_describes_the_requests(http):
    found = http.get("/openapi.json").json()
    schemas = found["components"]
    for path, body in {
        "/v1/chat/completions": CHAT | {"stop": "b", "temperature": 0.5},
        "/v1/completions": {"prompt": [[1, 2], [3]], "stop": ["a"]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
            "system": "b",
        },
        "/v1/responses": {"input": "a"},
        "/tokenize": {"prompt": "a"},
    }.items():
        operation = found["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        check = jsonschema.Draft202012Validator(schema | {"components": schemas})
        check.validate(body)
        assert http.post(path, json=body).status_code == 200
        wrong = body | {"temperature" if path != "/tokenize" else "prompt": ["hot"]}
        assert not check.is_valid(wrong)
        assert http.post(path, json=wrong).status_code == 400
    assert "best_of" not in schemas["schemas"]["CompletionFields"]["properties"]


def test_one_token_is_sent_once(server):
    with server.another_http(tokens=[b"sesame"]) as address:
        good, bad = ("authorization", "Bearer sesame"), ("authorization", "Bearer other")
        for headers, status in (
            ([good], 200),
            ([("x-api-key", "sesame")], 200),
            ([good, bad], 401),
            ([bad, good], 401),
            ([good, good], 401),
            ([("x-api-key", "other"), ("x-api-key", "sesame")], 401),
        ):
            asked = httpx.get(f"http://{address}/v1/models", headers=headers, timeout=LIMIT)
            assert asked.status_code == status, headers
