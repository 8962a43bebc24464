"""Runs a server that is looked at: `observed.py MANAGEMENT_PORT COMMAND …` opens its console, and receives its traces.

A page of the console follows the server's events, and one request in a hundred is traced.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SAMPLED = "0.01"  # of all requests


class Receiver(BaseHTTPRequestHandler):
    """Takes spans and drops them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def follow_console(port: int) -> None:
    """Read the events of a console, again whenever the server is not there."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", "/console/events?model=bench")
            response = connection.getresponse()
            while response.readline():
                pass
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()


def main() -> None:
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    threading.Thread(target=follow_console, args=(int(sys.argv[1]),), daemon=True).start()
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_port}"}
    server = subprocess.Popen([*sys.argv[2:], "--tracing", "--trace-sampling", SAMPLED], env=environment)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    sys.exit(server.wait())


if __name__ == "__main__":
    main()
