"""TLS between a server and the processes of other machines: the certificate is pinned, a token admits the client.

The server makes a certificate when it starts. Its fingerprint and a token that is good for one connection reach the
client on a way that is already protected. So both ends are known, without an authority. A worker on the server's own
machine shows its token on a Unix socket instead, without TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from flambeau.wire.channel import WorkerChannel, to_frame
from flambeau.wire.messages import ToServer

TOKEN_VARIABLE = "FLAMBEAU_WORKER_TOKEN"  # not on the command line, which every user can read
PIN_VARIABLE = "FLAMBEAU_WORKER_PIN"  # the fingerprint of the server's certificate; with it, TLS is spoken
HEARTBEAT_VARIABLE = "FLAMBEAU_WORKER_HEARTBEAT"
LOCAL_VARIABLE = "FLAMBEAU_WORKER_LOCAL"  # the server's Unix socket, for workers of its own machine
TOKEN_BYTES = 64  # hexadecimal digits
HEARTBEAT_S = 3.0  # after which a silent peer counts as lost
CONNECT_S = 10.0
READ_BYTES = 256 * 1024
SOCKET_BUFFER_BYTES = 1 << 20
MAX_FRAME_BYTES = (1 << 32) - 1  # the server limits what it sends
_CREDENTIALS = struct.Struct("3i")  # of the peer of a Unix socket: process, user, group


class WrongServer(Exception):
    """The peer has another certificate than the server."""


def fingerprint_of(certificate: bytes) -> str:
    """The fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()


def proof_of(secret: str, purpose: str, fingerprint: str) -> str:
    """What only a holder of the secret can make, for one certificate: whoever sits in between has another one."""
    return hmac.new(secret.encode(), f"{purpose} {fingerprint}".encode(), hashlib.sha256).hexdigest()


def server_context(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """The context of a listener; only processes of this project dial it, so TLS 1.3 is required."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a connection is never resumed
    with tempfile.TemporaryDirectory(prefix="flambeau-tls-") as folder:  # ssl reads only files; this folder is private
        files = Path(folder) / "certificate.pem", Path(folder) / "key.pem"
        files[0].write_bytes(certificate)
        files[1].write_bytes(key)
        context.load_cert_chain(*files)
    return context


def client_context() -> ssl.SSLContext:
    """A context that accepts any certificate: `check_pin` compares it before anything is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(peer: ssl.SSLSocket | ssl.SSLObject, fingerprint: str) -> None:
    """Raise WrongServer unless the peer has the pinned certificate."""
    certificate = peer.getpeercert(binary_form=True)
    if certificate is None or not hmac.compare_digest(fingerprint_of(certificate), fingerprint):
        raise WrongServer("the server has another certificate than the one that was announced")


def keep_alive(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernels of both machines exchange heartbeats: a peer that vanished is noticed after `timeout_s`.

    A worker answers them even while its handler holds the interpreter.
    """
    interval_s = max(1, int(timeout_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(timeout_s / interval_s) - 1))
        # For what was sent and not confirmed. The kernel looks at it now and then, so a quarter is left for that.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 750))


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in two; an IPv6 address may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen_locally() -> tuple[socket.socket, str]:
    """A Unix socket with a name in the abstract namespace, which only this machine and network namespace reaches."""
    name = f"flambeau-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener, name


def connect_locally(name: str, token: str) -> WorkerChannel | None:
    """Dial the server's Unix socket and show the token; None if the server runs elsewhere, or as another user.

    The user is compared because any user may take such a name once the server has ended.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(CONNECT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.connect(f"\0{name}")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
            sock.sendall(token.encode())
            return WorkerChannel(sock, MAX_FRAME_BYTES)
    except OSError:
        pass
    sock.close()
    return None


def connect_worker(address: str, fingerprint: str, token: str, heartbeat_s: float) -> TlsWorkerChannel:
    """Dial the server, check its certificate and show the token."""
    sock = socket.create_connection(split_address(address), timeout=CONNECT_S)
    try:
        keep_alive(sock, heartbeat_s)
        channel = TlsWorkerChannel(sock)
        channel.handshake(fingerprint, token)
    except BaseException:
        sock.close()
        raise
    return channel


class TlsWorkerChannel(WorkerChannel):
    """The worker's end of a channel inside TLS.

    The socket is read without a lock and decrypted with one: handlers may send from threads of their own.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(sock, max_frame_bytes)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context().wrap_bio(self._received, self._to_send)
        self._encrypted = memoryview(bytearray(READ_BYTES))

    def handshake(self, fingerprint: str, token: str) -> None:
        """Raise WrongServer if the certificate is another; the socket has a time limit meanwhile."""
        self.socket.settimeout(CONNECT_S)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.socket.sendall(self._to_send.read())
                data = self.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError("the server closed the connection") from None
                self._received.write(data)
        check_pin(self._tls, fingerprint)
        self._tls.write(token.encode())
        self.socket.sendall(self._to_send.read())
        self.socket.settimeout(None)

    def send(self, messages: Sequence[ToServer]) -> None:
        frame = to_frame(messages)
        with self._sending:
            self._tls.write(frame)
            self.socket.sendall(self._to_send.read())

    def _read(self, flags: int) -> bool:
        count = self.socket.recv_into(self._encrypted, 0, flags)
        if not count:
            return False
        received, tls = self._received, self._tls
        with self._sending:
            received.write(self._encrypted[:count])
            try:
                while received.pending or tls.pending():
                    size = cast(int, tls.read(READ_BYTES, self._frames.space()))  # into a buffer: a number
                    if not size:
                        return False
                    self._take(size)
            except ssl.SSLWantReadError:  # half a record
                pass
            except ssl.SSLZeroReturnError:
                return False
        return True
