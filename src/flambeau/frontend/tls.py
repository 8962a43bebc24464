"""Certificates for TLS listeners: PEM files, a key store, or a self-signed one."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

from flambeau.certificates import key_to_pem, self_signed, to_pem
from flambeau.config.server import Tls
from flambeau.errors import ConfigError
from flambeau.small_files import read_small


def server_context(tls: Tls, host: str) -> ssl.SSLContext:
    """The TLS context of a listener; TLS 1.2 and newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.client_ca_file is not None:
        authorities(tls.client_ca_file)
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
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


def authorities(file: Path) -> bytes:
    """The certificates of those whose clients are accepted, as PEM."""
    try:
        content = read_small(file)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except ssl.SSLError:
        raise ConfigError(f"client_ca_file: {file} holds no certificate in PEM format") from None
    except OSError as error:
        raise ConfigError(f"client_ca_file: {file} cannot be read: {error.strerror}") from None
    return content


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
