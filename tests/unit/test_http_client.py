"""Addresses of servers are checked, and responses are read whole."""

from __future__ import annotations

import pytest

from flambeau.errors import ConfigError
from flambeau.http_client import HttpReply, connect


@pytest.mark.parametrize("url", ["/no/such", "http://[bad", "http://127.0.0.1:99999", "http://x:port", "ftp://x"])
def test_invalid_address_is_rejected(url):
    with pytest.raises(ConfigError, match="is not a server's address; write http://host:port"):
        connect(url)


def test_error_reply_has_a_message_and_a_cause():
    reply = HttpReply(500, {}, b'{"code": 500, "message": "no", "cause": ["a", "b"]}')
    assert (reply.message, reply.cause) == ("no", "a\nb")
