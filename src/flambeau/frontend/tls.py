"""Certificates for TLS listeners: PEM files, a key store, or a self-signed one."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flambeau.config.server import Tls
from flambeau.errors import ConfigError
from flambeau.small_files import read_small

SELF_SIGNED_DAYS = 365


def server_context(tls: Tls, host: str) -> ssl.SSLContext:
    """The TLS context of a listener; TLS 1.2 and newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.certificate_file is not None and tls.private_key_file is not None:
        load(context, tls.certificate_file, tls.private_key_file)
        return context
    if tls.certificate_file is not None or tls.private_key_file is not None:
        raise ConfigError("certificate_file and private_key_file go together; one of them is missing")
    certificate, key = pem(tls, host)
    with tempfile.TemporaryDirectory(prefix="flambeau-tls-") as folder:  # ssl reads only files; this folder is private
        files = Path(folder) / "certificate.pem", Path(folder) / "key.pem"
        files[0].write_bytes(certificate)
        files[1].write_bytes(key)
        load(context, *files)
    return context


def load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for file in (certificate, key):
        try:
            read_small(file)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}; certificate_file and private_key_file name PEM files"
            ) from None
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # otherwise ssl asks at the terminal
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{certificate} and {key} cannot be used for TLS: {error}") from None


def pem(tls: Tls, host: str) -> tuple[bytes, bytes]:
    """A certificate chain and its key: from their files, from the key store, or self-signed."""
    if tls.certificate_file is not None and tls.private_key_file is not None:
        return tls.certificate_file.read_bytes(), tls.private_key_file.read_bytes()
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "TLS with a key store or without a certificate needs the package cryptography: "
            "pip install 'flambeau[tls]', or name certificate_file and private_key_file"
        ) from None
    return self_signed(host) if tls.keystore is None else from_keystore(tls)


def from_keystore(tls: Tls) -> tuple[bytes, bytes]:
    """The first key of a PKCS12 key store, with its certificates."""
    from cryptography.hazmat.primitives.serialization import pkcs12

    assert tls.keystore is not None
    try:
        content = read_small(tls.keystore)
    except OSError as error:
        raise ConfigError(f"the key store {tls.keystore} cannot be read: {error.strerror}") from None
    if content[:4] == b"\xfe\xed\xfe\xed":
        raise ConfigError(
            f"{tls.keystore} is a JKS key store, which only Java reads; convert it: keytool -importkeystore "
            f"-srckeystore {tls.keystore} -destkeystore {tls.keystore.with_suffix('.p12')} -deststoretype PKCS12"
        )
    try:
        key, certificate, others = pkcs12.load_key_and_certificates(content, tls.keystore_pass.encode())
    except ValueError as error:
        raise ConfigError(f"the key store {tls.keystore} cannot be opened with keystore_pass: {error}") from None
    if key is None or certificate is None:
        raise ConfigError(f"the key store {tls.keystore} holds no key with a certificate")
    chain = b"".join(to_pem(item) for item in (certificate, *others))
    return chain, key_to_pem(key)


def self_signed(host: str) -> tuple[bytes, bytes]:
    """A new self-signed certificate for this host, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([*dict.fromkeys(names)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return to_pem(certificate), key_to_pem(key)


def to_pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = certificate.public_bytes(Encoding.PEM)
    return pem


def key_to_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem
