"""AWS Signature Version 4 for a GET from S3 (pure)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl, quote, unquote

from flambeau.serving.model_sources.urls import WebAddress

ALGORITHM = "AWS4-HMAC-SHA256"
NO_BODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An AWS access key and its region."""

    access_key: str
    secret_key: str
    region: str
    session_token: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Credentials:
        """Read the variables of the AWS tools; raises ValueError if one is missing."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise ValueError(f"s3_sse_kms needs the variables {', '.join(names)}; {', '.join(missing)} is not set")
        access_key, secret_key, region = (environment[name] for name in names)
        token = environment.get("AWS_SESSION_TOKEN", "")
        return cls(access_key=access_key, secret_key=secret_key, region=region, session_token=token)


def signed_headers(address: WebAddress, credentials: Credentials, now: datetime) -> dict[str, str]:
    """The headers that sign a GET of this address at this time (UTC)."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": address.netloc, "x-amz-content-sha256": NO_BODY, "x-amz-date": stamp}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    scope = f"{stamp[:8]}/{credentials.region}/s3/aws4_request"
    request = "\n".join(
        [
            "GET",
            quote(unquote(address.path), safe="/~"),
            _canonical_query(address.query),
            *(f"{name}:{headers[name].strip()}" for name in sorted(headers)),
            "",
            names,
            NO_BODY,
        ]
    )
    to_sign = "\n".join([ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    credential = f"{credentials.access_key}/{scope}"
    del headers["host"]  # the connection writes it
    return {
        **headers,
        "authorization": f"{ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}",
    }


def _canonical_query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    return "&".join(sorted(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in pairs))
