from __future__ import annotations

from dataclasses import replace

import pytest

from flambeau.config.server import Address, GrpcConfig, ServerConfig, Tls, check_protection
from flambeau.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:9000", Address("127.0.0.1", 9000)),
        ("http://0.0.0.0", Address("0.0.0.0", 8080)),
        ("localhost:1", Address("localhost", 1)),
        ("http://[::1]:7", Address("::1", 7)),
        ("unix:/tmp/s", Address(path="/tmp/s")),
    ],
)
def test_addresses_are_read(text, address):
    assert Address.parse(text, default_port=8080) == address


@pytest.mark.parametrize(
    "text",
    [
        *("ftp://x", "http://", "http://host:port", "http://[::", "[", "[]", "::1", "http://h:99999", "http://a b:1"),
        *("http://h/path", "http://h?x", "http://u@h", "a\0b", "\ud800", "x" * 5000, "http://a..b", "x" * 100),
    ],
)
def test_invalid_addresses_are_rejected(text):
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(text, default_port=1)


@pytest.mark.parametrize("text", ["unix:", "unix:a\0b", "unix:/" + "x" * 107])
def test_paths_that_no_socket_can_have_are_rejected(text):
    with pytest.raises(ConfigError, match="is not a path of 1 to 107 bytes; write unix:/path"):
        Address.parse(text, default_port=1)


@pytest.mark.parametrize("host", ["", "a b", "x" * 300, "x" * 64, "\udcff", "a\0b"])
def test_host_of_a_flag_is_checked_too(host):
    with pytest.raises(ConfigError, match="is not a host; write an IP address, or a name"):
        Address(host, 80)


def test_port_that_could_not_ask_for_client_certificates_is_an_error(tmp_path):
    safe = Address(is_tls=True)
    listeners = {"inference": safe, "management": Address(path="/tmp/s"), "metrics": None}
    config = ServerConfig(tls=Tls(client_ca_file=tmp_path / "ca.pem"), **listeners)
    check_protection(config)
    for name, plain in (
        ("metrics", Address(port=8082)),
        ("grpc", GrpcConfig(inference=Address(port=8082))),
    ):
        with pytest.raises(ConfigError, match=r"client_ca_file is set, but http://127.0.0.1:8082 would answer clients"):
            check_protection(replace(config, **{name: plain}))
    check_protection(replace(config, grpc=GrpcConfig(inference=Address(port=7070), is_tls=True)))


def test_error_details_are_shown_on_loopback_only():
    assert ServerConfig().shows_error_details
    assert not ServerConfig(inference=Address("0.0.0.0", 1)).shows_error_details
    assert ServerConfig(inference=Address("0.0.0.0", 1), error_details=True).shows_error_details
    public = Address("0.0.0.0", 1)
    for listeners in ({"management": public}, {"metrics": public}, {"grpc": GrpcConfig(inference=public)}):
        assert not ServerConfig(**listeners).shows_error_details
    assert str(Address("::1", 7)) == "http://[::1]:7"
