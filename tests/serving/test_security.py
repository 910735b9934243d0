"""Access: TLS, certificates of clients, bearer tokens, and which answers need them."""

import contextlib
import logging
import os
import resource
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from peagle_jax.config import ConfigError
from serving import bearer_tokens
from serving.access import prepare_access
from serving.bearer_tokens import TokenFile
from serving.client import main
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.settings import MOST_CONNECTIONS, Settings
from serving.tls import Certificates
from tests.serving.certificates import authority, signed
from tests.serving.live import LiveServer
from tests.serving.test_http_errors import LONG, refusal
from tests.waiting import LIMIT, eventually

SHORT = pb.GenerateRequest(text="a", stopping=pb.Stopping(max_tokens=3, ignore_eos=True))
TOKENS = "# of the tests\nopen-sesame\n\n  second  \n"


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Two authorities, and what they signed."""
    folder = tmp_path_factory.mktemp("pki")
    ca, other = authority(folder, "ca"), authority(folder, "other")
    made = {name: signed(folder, name, ca) for name in ("server", "client", "second")}
    return made | dict(ca=ca, other=other, stranger=signed(folder, "stranger", other))


@pytest.fixture(scope="module")
def files(pki, tmp_path_factory):
    """What the secure server reads: a certificate, a key and tokens, which tests may replace."""
    folder = tmp_path_factory.mktemp("server")
    put(pki["server"].cert, folder / "cert.pem")
    put(pki["server"].key, folder / "key.pem")
    (folder / "tokens").write_text(TOKENS)
    return folder


def put(source: str, target: Path) -> None:
    """Replaces a file, as a rotation of certificates does."""
    shutil.copy(source, f"{target}.new")
    os.replace(f"{target}.new", target)


@pytest.fixture(scope="module")
def secure(make_engine, files, pki):
    """TLS, certificates of clients and tokens, all at once."""
    with LiveServer(
        make_engine(),
        certificates=Certificates(str(files / "cert.pem"), str(files / "key.pem"), pki["ca"].cert),
        tokens=TokenFile(files / "tokens"),
        with_reflection=True,
    ) as server:
        yield server


def channel(server, pki, client="client", ca="ca") -> grpc.Channel:
    """A new connection: gRPC would share those of equal options."""
    roots = Path(pki[ca].cert).read_bytes()
    cert, key = pki[client].bytes() if client else (None, None)
    credentials = grpc.ssl_channel_credentials(roots, key, cert)
    return grpc.secure_channel(
        server.address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
    )


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def generate(over: grpc.Channel, token: str | None = "open-sesame", **options):
    stub = peagle_v1_pb2_grpc.GenerationStub(over)
    metadata = None if token is None else bearer(token)
    return stub.GenerateOnce(SHORT, metadata=metadata, timeout=LIMIT, **options)


def status(function, *args, **named) -> grpc.StatusCode:
    try:
        function(*args, **named)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_clients_without_tls_cannot_connect(secure):
    with grpc.insecure_channel(secure.address) as over:
        assert status(generate, over) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("client", "ca"), [(None, "ca"), ("stranger", "ca"), ("client", "other")])
def test_certificates_of_other_authorities_are_refused(secure, pki, client, ca):
    with channel(secure, pki, client, ca) as over:
        assert status(generate, over) is grpc.StatusCode.UNAVAILABLE


def test_tls_needs_no_client_certificate_by_default(make_engine, pki):
    server = LiveServer(
        make_engine(), certificates=Certificates(pki["server"].cert, pki["server"].key)
    )
    with channel(server, pki, client=None) as over:
        found = every_call(over, None)
        assert found.pop("reflection") is grpc.StatusCode.UNIMPLEMENTED  # it was not asked for
        assert set(found.values()) == {grpc.StatusCode.OK}
    server.close()


def subject(server, pki) -> str:
    """Common name of the server's present certificate."""
    context = ssl.create_default_context(cafile=pki["ca"].cert)
    context.load_cert_chain(pki["client"].cert, pki["client"].key)
    context.set_alpn_protocols(["h2"])
    host, _, port = server.address.partition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        return dict(pair[0] for pair in wrapped.getpeercert()["subject"])["commonName"]


def test_new_certificates_are_used_without_a_restart(secure, pki, files, caplog):
    with channel(secure, pki) as old:
        generate(old)
        assert subject(secure, pki) == "server"
        put(pki["second"].cert, files / "cert.pem")
        with caplog.at_level(logging.INFO):
            assert subject(secure, pki) == "server"  # half of a rotation changes nothing
            assert "the key is not this certificate's" in caplog.text
            put(pki["second"].key, files / "key.pem")
            assert subject(secure, pki) == "second"
            assert "were read again" in caplog.text
        generate(old)  # open connections continue
        (files / "key.pem").unlink()
        assert subject(secure, pki) == "second"
        put(pki["server"].cert, files / "cert.pem")
        put(pki["server"].key, files / "key.pem")
        assert subject(secure, pki) == "server"
    with channel(secure, pki) as new:
        generate(new)


def every_call(over: grpc.Channel, metadata) -> dict[str, grpc.StatusCode]:
    """The status of each call there is, reflection included, by name."""
    generation = peagle_v1_pb2_grpc.GenerationStub(over)
    mirror = reflection_pb2_grpc.ServerReflectionStub(over)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    about = pb.GetModelInfoRequest()
    calls = {
        "Generate": lambda: list(generation.Generate(SHORT, metadata=metadata)),
        "GenerateOnce": lambda: generation.GenerateOnce(SHORT, metadata=metadata),
        "Abort": lambda: generation.Abort(pb.AbortRequest(), metadata=metadata),
        "FlushCache": lambda: generation.FlushCache(pb.FlushCacheRequest(), metadata=metadata),
        "GetModelInfo": lambda: generation.GetModelInfo(about, metadata=metadata),
        "GetStats": lambda: generation.GetStats(pb.GetStatsRequest(), metadata=metadata),
        "reflection": lambda: list(mirror.ServerReflectionInfo(iter([ask]), metadata=metadata)),
    }
    methods = pb.DESCRIPTOR.services_by_name["Generation"].methods
    assert set(calls) - {"reflection"} == {method.name for method in methods}
    return {name: status(call) for name, call in calls.items()}


WRONG = (None, "", "open-sesame", "Bearer", "Bearer open-sesam", "Bearer # of the tests", "Basic a")


@pytest.mark.parametrize("header", WRONG)
def test_every_call_needs_a_token(secure, pki, header):
    metadata = None if header is None else [("authorization", header)]
    with channel(secure, pki) as over:
        assert set(every_call(over, metadata).values()) == {grpc.StatusCode.UNAUTHENTICATED}
    secure.check_empty()


def test_a_right_token_opens_every_call(secure, pki):
    with channel(secure, pki) as over:
        for header in ("Bearer open-sesame", "bearer  second "):
            found = every_call(over, [("authorization", header)])
            assert set(found.values()) == {grpc.StatusCode.OK}


def test_a_call_with_two_tokens_has_none(secure, pki):
    known, other = ("authorization", "Bearer open-sesame"), ("authorization", "Bearer other")
    with channel(secure, pki) as over:
        for metadata in ([known, other], [other, known]):
            refused = set(every_call(over, metadata).values())
            assert refused == {grpc.StatusCode.UNAUTHENTICATED}


def test_health_needs_no_token(secure, pki):
    with channel(secure, pki) as over:
        stub = health_pb2_grpc.HealthStub(over)
        request = health_pb2.HealthCheckRequest()
        assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(request)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_every_token_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(given, token):
        compared.append(token)
        return given == token

    monkeypatch.setattr(bearer_tokens.hmac, "compare_digest", compare)
    tokens = (b"first", b"second", b"third")
    assert bearer_tokens.token_of(["Bearer first"], tokens)
    assert compared == list(tokens)
    assert not bearer_tokens.token_of(["Bearer fourth"], tokens)
    assert compared == [*tokens, *tokens]


def test_old_connections_are_closed_after_their_calls(make_engine):
    server = LiveServer(make_engine(), max_connection_seconds=0.5)
    states = []
    with grpc.insecure_channel(server.address) as over:
        over.subscribe(states.append)
        watch = health_pb2_grpc.HealthStub(over).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        eventually(lambda: grpc.ChannelConnectivity.IDLE in states[1:])
        assert states[-1] is grpc.ChannelConnectivity.IDLE  # it was asked to go
        assert watch.is_active()
        generate(over, token=None)  # over a new connection, without a word
        assert watch.is_active()
        watch.cancel()
    server.close()


def test_the_client_speaks_tls_and_shows_its_token(secure, pki, tmp_path, capsys):
    (tmp_path / "token").write_text("second\n")
    mine = pki["client"]
    tls = ["--tls-ca", pki["ca"].cert, "--tls-cert", mine.cert, "--tls-key", mine.key]
    token = ["--token-file", str(tmp_path / "token")]

    def run(*options: str) -> tuple[int, str]:
        plain = ["--address", secure.address, "a", "--max-tokens", "3", "--ignore-eos"]
        return main([*plain, *options]), capsys.readouterr().err

    def check(code: int, words: str, *options: str) -> None:
        found, said = run(*options)
        assert found == code
        assert words in said

    check(0, "(3 tokens in", *tls, *token)
    check(2, "authorization: Bearer", *tls)
    check(3, "do both sides use TLS")
    (tmp_path / "token").write_text("\n")
    check(2, "must be a token", *tls, *token)


@pytest.mark.parametrize(
    ("cert", "key", "ca", "word"),
    [
        ("/no/such", "server.key", None, "/no/such.*No such file"),
        ("server.pem", "/no/such", None, "/no/such.*No such file"),
        ("server.pem", "server.key", "/no/such", "/no/such.*No such file"),
        ("server.pem", "second.key", None, "the key is not this certificate's"),
        ("server.key", "server.key", None, "not PEM"),
        ("server.pem", "server.key", "server.csr", "server.csr.*not PEM"),
        ("server.pem", "locked.key", None, "encrypted"),
    ],
)
def test_invalid_certificates_are_refused_at_the_start(pki, cert, key, ca, word):
    folder = Path(pki["server"].cert).parent
    if key == "locked.key":
        command = f"openssl ec -in {folder}/server.key -aes128 -passout pass:a -out {folder}/{key}"
        subprocess.run(command.split(), check=True, capture_output=True)
    paths = [None if name is None else str(folder / name) for name in (cert, key, ca)]
    with pytest.raises(ConfigError, match=word):
        Certificates(*paths)


def test_invalid_token_files_are_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the bearer tokens"):
        TokenFile(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="holds no bearer token"):
        TokenFile(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the bearer tokens"):
        TokenFile(tmp_path / "binary")


NO_TOKENS = (
    "scope=admin",
    " scope=admin",
    "SECRET Scope=admin",
    "SECRET scope = admin",
    "a SECRET",
)
NO_TOKENS += ("SECRET scope=admin more", "scope=admin scope=admin", "SECRETscope=admin")


@pytest.mark.parametrize("line", NO_TOKENS)
def test_a_line_that_is_nearly_a_token_with_a_scope_is_refused(tmp_path, line):
    """Its text would be a bearer token: one that everyone can guess."""
    (tmp_path / "tokens").write_text(f"# tokens\nsecond\n{line}\n")
    with pytest.raises(
        ConfigError, match="line 3 is neither TOKEN nor TOKEN scope=admin"
    ) as refused:
        TokenFile(tmp_path / "tokens")
    assert "SECRET" not in str(refused.value)


def test_a_token_opens_everything_but_health(make_engine, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("open-sesame\n")
    with (
        LiveServer(make_engine(), http=True, tokens=TokenFile(file)) as server,
        server.client() as http,
    ):
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        known = {"authorization": "Bearer open-sesame"}
        for given in ({}, {"authorization": "Bearer x"}, {"authorization": "open-sesame"}):
            for path in ("/metrics", "/v1/models", "/version", "/nothing"):
                refused = http.get(path, headers=given)
                assert refusal(refused, 401)["type"] == "authentication_error"
                assert refused.headers["www-authenticate"] == "Bearer"
            refusal(http.post("/v1/completions", json=LONG, headers=given), 401)
        assert http.get("/metrics", headers=known).status_code == 200
        assert http.post("/v1/completions", json=LONG, headers=known).status_code == 200
        os.utime(file, (1, 1))
        file.write_text("another-one\n")
        refusal(http.get("/metrics", headers=known), 401)
        assert http.get("/metrics", headers={"authorization": "bearer another-one"}).is_success


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_outlives_the_authority_of_its_client(make_engine, pki, tmp_path, version):
    authorities = tmp_path / "ca"
    authorities.write_bytes(pki["ca"].bytes()[0])
    certificates = Certificates(pki["server"].cert, pki["server"].key, str(authorities))
    server = LiveServer(make_engine(), http=True, certificates=certificates)
    contexts = {}
    for client in ("client", "stranger"):
        contexts[client] = ssl.create_default_context(cafile=pki["ca"].cert)
        contexts[client].load_cert_chain(pki[client].cert, pki[client].key)
        contexts[client].maximum_version = version
    host, _, port = server.http_address.partition(":")

    def visit(client: str, session=None) -> tuple[bool, ssl.SSLSession] | None:
        """Whether the session was resumed, and the next one; None if the server hangs up."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), LIMIT) as plain,
            contexts[client].wrap_socket(plain, server_hostname=host, session=session) as secure,
        ):
            secure.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return (secure.session_reused, secure.session) if secure.recv(15) else None
        return None

    _, session = visit("client")
    resumed, session = visit("client", session)
    assert resumed
    assert visit("stranger") is None
    authorities.write_bytes(pki["other"].bytes()[0])
    assert visit("client", session) is None
    assert visit("stranger") is not None
    server.close()


FREE = dict(port=0, http_port=0)


@pytest.fixture
def limits(monkeypatch):
    """Limits of descriptors, soft and hard, that exist in this test only."""

    def use(soft: int, hard: int) -> list[int]:
        now = [soft, hard]
        monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
        monkeypatch.setattr(resource, "setrlimit", lambda which, both: now.__setitem__(0, both[0]))
        return now

    return use


def test_the_soft_limit_of_descriptors_is_raised_to_what_is_needed(limits):
    now = limits(1024, 1 << 20)
    assert prepare_access(Settings(**FREE)).max_connections == MOST_CONNECTIONS
    assert now[0] == 128 + 2 * (MOST_CONNECTIONS + 16)
    assert prepare_access(Settings(**FREE, max_connections=10)).max_connections == 10
    assert now[0] == 128 + 2 * (MOST_CONNECTIONS + 16)  # never lowered


def test_more_connections_than_descriptors_are_refused_with_what_fits(limits):
    limits(300, 300)
    assert prepare_access(Settings(**FREE, max_connections=70)).max_connections == 70
    with pytest.raises(ConfigError, match=r"max_connections=71 needs 302 .* 300: lower it to 70"):
        prepare_access(Settings(**FREE, max_connections=71))
    limits(160, 160)
    with pytest.raises(ConfigError, match=r"160 file descriptors.*\(ulimit -n\) to 162"):
        prepare_access(Settings(**FREE))


def test_a_process_without_a_limit_has_all_connections(limits):
    limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert prepare_access(Settings(**FREE)).max_connections == MOST_CONNECTIONS


@pytest.mark.parametrize("host", ["999.1.1.1", "a..b"])
def test_a_host_that_is_no_address_is_named_before_grpc_sees_it(host):
    with pytest.raises(
        OSError, match=f"^host='{host}' is no address or name that this machine knows"
    ):
        prepare_access(Settings(port=0, http_port=-1, host=host))


def test_files_are_read_again_and_bad_ones_change_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ca = authority(tmp_path, "ca")
    pair, second = (signed(tmp_path, name, ca).bytes() for name in ("server", "second"))
    cert, key, tokens = (tmp_path / name for name in ("cert", "key", "tokens"))
    cert.write_bytes(pair[0])
    key.write_bytes(pair[1])
    tokens.write_text("first\n")
    files = dict(tls_cert=str(cert), tls_key=str(key), auth_token_file=str(tokens))
    access = prepare_access(Settings(**FREE, **files))
    served = lambda: access.certificates.newest().cert
    before = served()
    access.read_again()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    caplog.clear()
    cert.write_bytes(second[0])  # not this key's
    stat = tokens.stat()
    tokens.write_text("######")  # as long and as old as before: only an order can find it
    os.utime(tokens, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    access.read_again()
    assert (list(access.tokens), served()) == ([b"first"], before)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("the old ones stay in use" in message for message in messages)
    key.write_bytes(second[1])
    tokens.write_text("second")
    access.read_again()
    assert list(access.tokens) == [b"second"]
    assert served() != before
