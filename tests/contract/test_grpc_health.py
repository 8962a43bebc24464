"""grpc.health.v1 and reflection, on both ports, with the public clients."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from support.grpc_calls import Client, grpc_flags, refusal, stubs

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"
OPEN_INFERENCE = ("org.pytorch.serve.grpc.openinference.GRPCInferenceService", "inference.GRPCInferenceService")


@pytest.fixture
def opened(start):
    clients = []

    def start_server(*words):
        flags = grpc_flags()
        server = start(*words, *flags)
        client = Client(int(flags[1]), int(flags[3]))
        clients.append(client)
        return server, client

    yield start_server
    for client in clients:
        client.close()


def check(channel, service=""):
    asked = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60, wait_for_ready=True).status


def test_health_of_ports_and_services(opened):
    server, client = opened("orders.py")
    server.wait_ready()
    for service in ("", INFERENCE, *OPEN_INFERENCE):
        assert check(client.channel, service) == SERVING
    for service in ("", MANAGEMENT):
        assert check(client.management_channel, service) == SERVING
    assert refusal(check, client.channel, "no.such.Service")[0] is StatusCode.NOT_FOUND
    assert refusal(check, client.channel, MANAGEMENT)[0] is StatusCode.NOT_FOUND


def test_a_server_whose_model_cannot_load_is_not_serving(opened):
    server, client = opened("broken.py")
    server.wait_started()
    assert check(client.channel) == NOT_SERVING
    assert check(client.management_channel) == SERVING


def test_watchers_get_changes_and_do_not_delay_the_end(opened):
    server, client = opened("orders.py")
    server.wait_ready()
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == SERVING
    unknown = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service="x"), timeout=60)
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    server.process.terminate()
    assert next(watch).status == NOT_SERVING
    assert [*watch] == []
    assert server.process.wait(60) == 0


def test_reflection_describes_every_service(opened):
    server, client = opened("orders.py")
    server.wait_ready()
    health, reflection = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
    for channel, expected in (
        (client.channel, {INFERENCE, *OPEN_INFERENCE, health, reflection}),
        (client.management_channel, {MANAGEMENT, health, reflection}),
    ):
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {*database.get_services()} == expected
        pool = DescriptorPool(database)
        for name in expected:
            assert pool.FindServiceByName(name).full_name == name
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(client.channel))
    theirs = stubs().inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"]
    ours = pool.FindServiceByName(INFERENCE)
    assert [method.name for method in ours.methods] == [method.name for method in theirs.methods]
