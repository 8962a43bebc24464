from __future__ import annotations

from flambeau.logs.access_log import grpc_line, http_line, remote_of

SIGNED = "https://b.s3.amazonaws.com/m.mar?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=abc&x=1"


def test_lines_of_http_and_grpc_calls():
    remote = remote_of(("127.0.0.1", 40122))
    assert http_line(remote, "POST", "/predictions/m", "", "1.1", 200, 0.0371, 0) == (
        '/127.0.0.1:40122 "POST /predictions/m HTTP/1.1" 200 37'
    )
    assert '"GET /models?limit=2 HTTP/1.0" 404 0' in http_line(remote, "GET", "/models", "limit=2", "1.0", 404, 0, 0)
    method = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    assert grpc_line("ipv4:127.0.0.1:59418", method, 0, 0.012, 0) == (
        '/127.0.0.1:59418 "gRPC org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions HTTP/2.0" 0 12'
    )
    assert remote_of("ipv6:%5B::1%5D:50051") == "/::1:50051"
    assert remote_of("") == remote_of(None) == "/local"


def test_access_log_has_no_signatures():
    line = http_line("/h:1", "POST", "/models", f"url={SIGNED}", "1.1", 200, 0.001, 0.0)
    assert "abc" not in line
    assert "AKIA" not in line
    assert "/models?url=https://b.s3" in line
