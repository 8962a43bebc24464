from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flambeau.serving.model_sources.aws_signature import Credentials, signed_headers
from flambeau.serving.model_sources.urls import parse_web_url

# The examples of Amazon's own description of the algorithm.
EXAMPLE = Credentials(
    access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", region="us-east-1"
)
THEN = datetime(2013, 5, 24, tzinfo=UTC)


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("lifecycle", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signature_is_that_of_the_published_example(query, signature):
    headers = signed_headers(parse_web_url(f"https://examplebucket.s3.amazonaws.com/?{query}"), EXAMPLE, THEN)
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"
    )
    assert headers["x-amz-date"] == "20130524T000000Z"


def test_missing_variable_is_named():
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY is not set"):
        Credentials.from_environment({"AWS_ACCESS_KEY_ID": "a", "AWS_DEFAULT_REGION": "r"})


def test_session_token_is_signed_too():
    given = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "r",
        "AWS_SESSION_TOKEN": "t",
    }
    headers = signed_headers(parse_web_url("https://h/x.mar"), Credentials.from_environment(given), THEN)
    assert headers["x-amz-security-token"] == "t"
    assert "x-amz-date;x-amz-security-token" in headers["authorization"]
