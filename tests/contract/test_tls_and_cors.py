"""Listeners: TLS with every kind of certificate, unix sockets, one port for all, and CORS headers."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509 import load_pem_x509_certificate

from flambeau.config.server import Address, KeysConfig, Tls
from flambeau.errors import ConfigError
from flambeau.frontend.tls import self_signed, server_context
from support.configured import ConfiguredServer, trusting
from support.running import HANDLERS, free_ports

ECHO = HANDLERS / "echo.py"


@pytest.fixture
def files(tmp_path):
    certificate, key = self_signed("localhost")
    (tmp_path / "certificate.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    store = pkcs12.serialize_key_and_certificates(
        b"1",
        load_pem_private_key(key, None),
        load_pem_x509_certificate(certificate),
        None,
        BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "store.p12").write_bytes(store)
    return tmp_path


def get(port, path, context, body=None):
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body, {"Content-Type": "application/octet-stream"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def serve(folder, tls):
    inference, management, metrics = (Address(port=port, is_tls=True) for port in free_ports(3))
    return ConfiguredServer(folder, ECHO, inference=inference, management=management, metrics=metrics, tls=tls)


def wait_ready(server, context):
    def answers():
        try:
            return get(server.port, "/readyz", context)[0] == 200
        except OSError:
            return False

    server.until(answers)


def test_clients_without_a_certificate_of_the_named_authority_are_refused(files):
    certificate, key = self_signed("client")
    (files / "client.pem").write_bytes(certificate + key)
    tls = Tls(
        certificate_file=files / "certificate.pem",
        private_key_file=files / "key.pem",
        client_ca_file=files / "client.pem",
    )
    known, unknown, bare = (ssl.create_default_context(cafile=files / "certificate.pem") for _ in range(3))
    known.load_cert_chain(files / "client.pem")
    unknown.load_cert_chain(files / "certificate.pem", files / "key.pem")
    server = serve(files, tls)
    try:
        wait_ready(server, known)
        assert get(server.management_port, "/models", known)[0] == 200
        for context in (unknown, bare):
            for port in (server.port, server.management_port):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    get(port, "/ping", context)
    finally:
        assert server.stop() == 0


def test_authorities_that_are_none_are_an_error(files):
    pair = {"certificate_file": files / "certificate.pem", "private_key_file": files / "key.pem"}
    (files / "junk.pem").write_text("junk")
    for name, problem in (("junk.pem", "holds no certificate"), ("nowhere.pem", "cannot be read")):
        with pytest.raises(ConfigError, match=f"client_ca_file: .*{name} {problem}"):
            server_context(Tls(client_ca_file=files / name, **pair), "localhost")


@pytest.mark.parametrize("kind", ["pem", "keystore", "none"])
def test_https_with_every_kind_of_certificate(files, kind):
    tls = {
        "pem": Tls(certificate_file=files / "certificate.pem", private_key_file=files / "key.pem"),
        "keystore": Tls(keystore=files / "store.p12", keystore_pass="secret"),
        "none": Tls(),
    }[kind]
    context = trusting() if kind == "none" else ssl.create_default_context(cafile=files / "certificate.pem")
    server = serve(files, tls)
    try:
        wait_ready(server, context)
        assert get(server.management_port, "/models", context)[0] == 200
        status, body = get(server.port, "/predictions/echo", context, b"x" * 1_000_000)  # through shared memory
        assert (status, len(body) > 1_000_000) == (200, True)
        with socket.create_connection(("localhost", server.port)) as plain:
            plain.sendall(b"GET /ping HTTP/1.1\r\n\r\n")
            assert b"200" not in plain.recv(1000)
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"certificate_file": "certificate.pem"}, "go together"),
        (
            {"certificate_file": "certificate.pem", "private_key_file": "nothing.pem"},
            "nothing.pem cannot be read",
        ),
        ({"certificate_file": "key.pem", "private_key_file": "certificate.pem"}, "cannot be used for TLS"),
        ({"keystore": "nothing.p12"}, "cannot be read: No such file"),
        ({"keystore": "store.p12", "keystore_pass": "wrong"}, "cannot be opened with keystore_pass"),
        ({"keystore": "java.jks"}, "keytool -importkeystore"),
    ],
)
def test_certificates_that_cannot_be_used_say_why(files, changes, message):
    (files / "java.jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2")
    named = {key: value if key == "keystore_pass" else files / value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        server_context(Tls(**named), "localhost")


def test_nothing_older_than_tls_1_2_is_spoken():
    assert server_context(Tls(), "localhost").minimum_version == ssl.TLSVersion.TLSv1_2


def test_plain_listeners_never_load_cryptography():
    program = "import flambeau.cli.serve, sys; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_cors_headers_are_on_every_response(tmp_path):
    cors = (("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Methods", "GET, POST"))
    with ConfiguredServer(tmp_path, ECHO, cors=cors) as server:
        for reply in (
            server.request("GET", "/ping"),
            server.request("OPTIONS", "/predictions/echo"),
            server.request("GET", "/nowhere"),
            server.predict("echo", {}),
            server.manage("GET", "/models"),
        ):
            assert reply.headers["access-control-allow-origin"] == "*"
            assert reply.headers["access-control-allow-methods"] == "GET, POST"


def test_browsers_preflight_needs_no_key_where_browsers_are_expected(tmp_path):
    cors = (("Access-Control-Allow-Origin", "*"),)
    with ConfiguredServer(tmp_path, ECHO, cors=cors, keys=KeysConfig(is_on=True)) as server:
        assert server.request("OPTIONS", "/predictions/echo").status == 200
        assert server.request("POST", "/predictions/echo").status == 400


def ask_socket(path, request):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(request)
        return client.recv(65536)


def wait_started(server):
    server.until(lambda: b"Model server started." in server.log_path.read_bytes())


def test_unix_socket_of_a_killed_server_is_taken_over(tmp_path):
    path = tmp_path / "inference.sock"
    for _ in range(2):
        server = ConfiguredServer(tmp_path, ECHO, inference=Address(path=str(path)))
        wait_started(server)
        reply = ask_socket(path, b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi")
        assert reply.startswith(b"HTTP/1.1 200")
        second = ConfiguredServer(tmp_path, ECHO, inference=Address(path=str(path)))
        assert second.process.wait(60) != 0  # in use
        server.process.kill()
        server.process.wait()
        assert path.exists()


def test_one_port_serves_all_apis(tmp_path):
    address = Address(port=free_ports(1)[0])
    with ConfiguredServer(tmp_path, ECHO, inference=address, management=address, metrics=address) as server:
        assert server.request("GET", "/models/echo/1.0").json[0]["modelName"] == "echo"
        assert server.request("GET", "/models/echo/invoke").status == 200
        assert server.request("PUT", "/models/echo/1.0/set-default").status == 200
        assert server.request("OPTIONS", "/models/echo").json["info"]["title"] == "RESTful Management API for: echo"
        assert b"flambeau_workers_ready" in server.request("GET", "/metrics").body
        paths = json.loads(server.request("OPTIONS", "/").body)["paths"]
        assert {"/models", "/ping", "/predictions/{model_name}"} <= paths.keys()
