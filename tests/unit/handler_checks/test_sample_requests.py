"""Malformed requests are made from a good one."""

from __future__ import annotations

import json

from flambeau.handler_checks.sample_requests import JSON, Sample, malformed_samples


def test_malformed_requests_are_of_every_kind():
    bad = {sample.name: sample for sample in malformed_samples(Sample("x.png", "image/png", b"12345678"))}
    assert bad["truncated sample"].body == b"1234"
    assert bad["a good body as application/json"].content_type == JSON
    assert bad["random bytes as image/png"].body == bad["random bytes"].body
    assert json.loads(bad["huge string"].body)
    assert len(bad) == 11


def test_one_byte_cannot_be_truncated():
    assert "truncated sample" not in {sample.name for sample in malformed_samples(Sample("x", JSON, b"1"))}
