"""The start of a server names the addresses of its APIs."""

from __future__ import annotations

from flambeau.cli.lifecycle import describe_addresses
from flambeau.config.server import Address, GrpcConfig, ServerConfig


def test_every_api_is_named_with_its_actual_port():
    config = ServerConfig(
        inference=Address(port=0),
        management=Address(port=8081, is_tls=True),
        metrics=Address("::1", 8082),
        pages=True,
        grpc=GrpcConfig(inference=Address(port=7070), management=Address(port=7071)),
    )
    opened = {config.inference: Address(port=41000)} | {one: one for one in (config.management, config.metrics)}
    assert describe_addresses(config, opened, has_grpc=True) == (
        "management API https://127.0.0.1:8081, console https://127.0.0.1:8081/, metrics http://[::1]:8082/metrics, "
        "OpenAI base URL http://127.0.0.1:41000/v1, gRPC inference 127.0.0.1:7070, gRPC management 127.0.0.1:7071"
    )
    assert "gRPC" not in describe_addresses(config, opened, has_grpc=False)  # grpcio is not installed


def test_api_that_is_off_and_a_unix_socket_have_no_url():
    config = ServerConfig(inference=Address(path="/s"), management=Address(path="/s"), metrics=None)
    opened = {config.inference: config.inference}
    assert describe_addresses(config, opened, has_grpc=False) == "management API unix:/s"
