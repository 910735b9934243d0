"""Descriptors for connections, and files that are read again."""

import logging
import os
import resource

import pytest

from peagle_jax.config import ConfigError
from serving.access import prepare_access
from serving.settings import MOST_CONNECTIONS, Settings
from tests.serving.certificates import authority, signed

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
