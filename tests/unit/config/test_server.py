from __future__ import annotations

import pytest

from flambeau.config.server import Address, GrpcConfig, ServerConfig
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


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://host:port"])
def test_invalid_addresses_are_rejected(text):
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(text, default_port=1)


def test_error_details_are_shown_on_loopback_only():
    assert ServerConfig().shows_error_details
    assert not ServerConfig(inference=Address("0.0.0.0", 1)).shows_error_details
    assert ServerConfig(inference=Address("0.0.0.0", 1), error_details=True).shows_error_details
    public = Address("0.0.0.0", 1)
    for listeners in ({"management": public}, {"metrics": public}, {"grpc": GrpcConfig(inference=public)}):
        assert not ServerConfig(**listeners).shows_error_details
    assert str(Address("::1", 7)) == "http://[::1]:7"
