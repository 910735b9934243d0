"""Who may use the HTTP port: bearer tokens, certificates of both sides, and the port itself."""

import contextlib
import os
import socket
import ssl

import httpx
import pytest

from serving.bearer_tokens import TokenFile
from serving.tls import Certificates
from tests.serving.certificates import authority, signed
from tests.serving.live import LiveServer
from tests.serving.test_http_errors import LONG, refusal
from tests.waiting import LIMIT


def test_a_token_opens_everything_but_health(make_engine, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("open sesame\n")
    with (
        LiveServer(make_engine(), http=True, tokens=TokenFile(file)) as server,
        server.client() as http,
    ):
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        known = {"authorization": "Bearer open sesame"}
        for given in ({}, {"authorization": "Bearer x"}, {"authorization": "open sesame"}):
            for path in ("/metrics", "/v1/models", "/version", "/nothing"):
                refused = http.get(path, headers=given)
                assert refusal(refused, 401)["type"] == "authentication_error"
                assert refused.headers["www-authenticate"] == "Bearer"
            refusal(http.post("/v1/completions", json=LONG, headers=given), 401)
        assert http.get("/metrics", headers=known).status_code == 200
        assert http.post("/v1/completions", json=LONG, headers=known).status_code == 200
        os.utime(file, (1, 1))
        file.write_text("another one\n")
        refusal(http.get("/metrics", headers=known), 401)
        assert http.get("/metrics", headers={"authorization": "bearer another one"}).is_success


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca = authority(folder, "ca")
    made = {name: signed(folder, name, ca) for name in ("server", "second", "client")}
    other = authority(folder, "other")
    return made | dict(ca=ca, other=other, stranger=signed(folder, "stranger", other))


def peer_certificate(address: str, ca: str) -> bytes:
    host, _, port = address.partition(":")
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection((host, int(port)), timeout=LIMIT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.getpeercert(binary_form=True)


def test_tls_certificates_rotate(make_engine, pki, tmp_path):
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki["server"].bytes()[0])
    key.write_bytes(pki["server"].bytes()[1])
    server = LiveServer(make_engine(), http=True, certificates=Certificates(str(cert), str(key)))
    der = lambda pair: ssl.PEM_cert_to_DER_cert(pair.bytes()[0].decode())
    trusted = ssl.create_default_context(cafile=pki["ca"].cert)
    with httpx.Client(base_url=f"https://{server.http_address}", verify=trusted) as https:
        answer = https.post("/v1/completions", json=LONG, timeout=LIMIT)
        assert answer.json()["usage"]["completion_tokens"] == 90
    assert peer_certificate(server.http_address, pki["ca"].cert) == der(pki["server"])
    key.write_bytes(pki["second"].bytes()[1])
    cert.write_bytes(pki["second"].bytes()[0])
    assert peer_certificate(server.http_address, pki["ca"].cert) == der(pki["second"])
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{server.http_address}/health")
    server.close()


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
