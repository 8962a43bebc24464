"""TorchModelServiceWorker: a worker process that TorchServe's own server can drive.

python -m ts.model_service_worker --sock-type unix --sock-name /tmp/.ts.sock.9000
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flambeau.torchserve.metrics.cache import MetricsCacheYamlImpl
from flambeau.torchserve.worker_protocol.protocol import LOAD_MSG, PREDICT_MSG, create_load_model_response, retrieve_msg
from flambeau.torchserve.worker_protocol.service import AsyncService, HandlerService, ModelLoaderFactory
from flambeau.worker.failures import load_failed

SOCKET_ACCEPT_TIMEOUT = 30.0
DEBUG = False  # wait for a connection without a timeout
LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0)

logger = logging.getLogger(__name__)


class TorchModelServiceWorker:
    """Listens on a socket, loads the model that its peer names and answers its batches."""

    def __init__(
        self,
        s_type: str | None = None,
        s_name: str | None = None,
        host_addr: str | None = None,
        port_num: int | None = None,
        metrics_config: str | None = None,
        async_comm: bool = False,
    ) -> None:
        if s_type == "unix":
            if s_name is None:
                raise ValueError("Wrong arguments passed. No socket name given.")
            self.sock_name, self.port = name_for_rank(s_name, LOCAL_RANK), -1
            _remove_socket(self.sock_name)
        elif s_type == "tcp":
            if port_num is None:
                raise ValueError("Wrong arguments passed. No socket port given.")
            self.sock_name, self.port = host_addr or "127.0.0.1", int(port_num) + LOCAL_RANK
        else:
            raise ValueError("Incomplete data provided: a socket is unix, with a name, or tcp, with a port")
        self.sock_type = s_type
        self.sock = socket.socket(socket.AF_INET if s_type == "tcp" else socket.AF_UNIX, socket.SOCK_STREAM)
        self.metrics_cache = _read_metrics(metrics_config) if metrics_config else None
        self.async_comm = async_comm

    def load_model(self, load_model_request: Mapping[str, Any]) -> tuple[HandlerService | None, str, int]:
        """Load the model of a message; return the service, a message and a status."""
        fields = {key: value.decode() if isinstance(value, (bytes, bytearray)) else value
                for key, value in load_model_request.items()}  # fmt: skip
        name = fields["modelName"]
        if self.metrics_cache is not None:
            self.metrics_cache.model_name = name
        try:
            service = ModelLoaderFactory.get_model_loader().load(
                name,
                fields["modelPath"],
                fields.get("handler") or None,
                int(fields["gpu"]) if fields.get("gpu") is not None else None,
                int(fields["batchSize"]) if fields.get("batchSize") is not None else None,
                fields.get("envelope") or None,
                bool(fields.get("limitMaxImagePixels", True)),
                self.metrics_cache,
            )
        except Exception as error:
            failed = load_failed(error)
            logger.exception("Failed to load model %s", name)
            return None, "System out of memory" if failed.status == 507 else failed.message, failed.status
        return service, f"loaded model {name}", 200

    def handle_connection(self, cl_socket: Any) -> None:
        """Answer the messages of a peer in order, until it disconnects."""
        service: HandlerService | None = None
        while True:
            command, message = retrieve_msg(cl_socket)
            if command == LOAD_MSG:
                service = self._load(cl_socket, message)
            elif command != PREDICT_MSG:
                raise ValueError(f"Received unknown command: {command!r}")
            elif service is None:
                raise RuntimeError("Received a batch, but no model is loaded")
            elif (response := service.predict(message)) is not None:  # None at rank > 0
                cl_socket.sendall(response)

    def handle_connection_async(self, cl_socket: Any) -> None:
        """Load a model, then answer requests concurrently."""
        command, message = retrieve_msg(cl_socket)
        if command != LOAD_MSG:
            raise ValueError(f"Received {command!r} before a model was loaded")
        if error := AsyncService(self._load(cl_socket, message)).run():
            raise RuntimeError(error)

    def _load(self, cl_socket: Any, message: Mapping[str, Any]) -> HandlerService:
        service, result, code = self.load_model(message)
        cl_socket.sendall(create_load_model_response(code, result))
        if service is None:
            raise RuntimeError(f"{code} - {result}")
        service.set_cl_socket(cl_socket)
        return service

    def run_server(self) -> None:
        if not DEBUG:
            self.sock.settimeout(SOCKET_ACCEPT_TIMEOUT)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.bind(self.sock_name if self.sock_type == "unix" else (self.sock_name, self.port))
        self.sock.listen(1)
        logger.info("[PID]%d", os.getpid())
        logger.info("Torch worker started.")
        logger.info("Python runtime: %s", platform.python_version())
        while True:
            cl_socket, _ = self.sock.accept()
            cl_socket.setblocking(True)
            logger.info("MessageSource accepted: %s.", cl_socket.getsockname())
            if self.async_comm:
                self.handle_connection_async(cl_socket)
            else:
                self.handle_connection(cl_socket)


def name_for_rank(name: str, rank: int) -> str:
    """The socket name of a rank: a trailing number is increased by the rank."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}{dot}{int(number) + rank}" if number.isdigit() else name + (f".{rank}" if rank else "")


def _remove_socket(name: str) -> None:
    try:
        os.remove(name)
    except OSError as error:
        if os.path.exists(name):
            raise RuntimeError(f"socket already in use: {name}.") from error


def _read_metrics(path: str) -> MetricsCacheYamlImpl:
    cache = MetricsCacheYamlImpl(config_file_path=path)
    cache.initialize_cache()
    return cache


def main(arguments: list[str]) -> int:
    """Run a worker until its peer disconnects."""
    parser = argparse.ArgumentParser(prog="model_service_worker", description="A worker that TorchServe drives.")
    parser.add_argument("--sock-type", choices=["unix", "tcp"], required=True)
    parser.add_argument("--sock-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--metrics-config")
    parser.add_argument("--async", dest="async_comm", action="store_true")
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    try:
        TorchModelServiceWorker(
            given.sock_type, given.sock_name, given.host, given.port, given.metrics_config, given.async_comm
        ).run_server()
    except TimeoutError:
        logger.error("Backend worker did not receive connection in: %d", SOCKET_ACCEPT_TIMEOUT)
    except Exception:
        logger.exception("Backend worker process died.")
    finally:
        if given.sock_name is not None:
            with suppress(OSError):
                os.remove(name_for_rank(given.sock_name, LOCAL_RANK))
    return 1
