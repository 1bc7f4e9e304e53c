"""Who may connect to a federation: a certificate authority, the server's certificate, a key pair per node.

    ca.crt, ca.key            the authority; nodes need `ca.crt` to verify the server, `ca.key` stays with its owner
    server.pem, server.key    the server's certificate, for the host names and addresses it was made for
    NAME, NAME.pub            a node's key pair; the server registers the public half, the private one stays on the node

All keys are elliptic-curve ones on P-384. Private files are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.deploy import require_package
from polyfed.errors import ConfigError
from polyfed.places import check_name, private_files
from polyfed.records.read import atomic_write

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["AUTHORITY", "AUTHORITY_KEY", "SERVER", "SERVER_KEY", "make_node_key", "make_server_certificate"]

AUTHORITY = "ca.crt"
AUTHORITY_KEY = "ca.key"
SERVER = "server.pem"
SERVER_KEY = "server.key"
_HERE = ("localhost", "127.0.0.1")  # where a server's own programs, and a proxy beside it, call it
_DAYS = 365  # that a server's certificate is good for; a new authority ten times as long
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")  # one part of a host name


def make_server_certificate(folder: str | Path, hosts: Sequence[str], overwrite: bool = False) -> list[Path]:
    """Write a server's certificate, and the authority that signs it where the folder has none yet.

    Args:
        folder: made if missing; the authority in it is kept, so that a renewed certificate needs no change on nodes.
        hosts: the server's host names and IP addresses, at least one; this machine's own are added.
        overwrite: replace a server's certificate that is there.

    Returns:
        The files written.

    Raises:
        ConfigError: no host, a host that is neither name nor address, a certificate is there already, half an
            authority, or `cryptography` is missing.
    """
    require_package("cryptography", "making keys")
    from cryptography.hazmat.primitives import serialization as form

    check_name(folder)
    keys = Path(folder)
    names = [_subject_name(host) for host in dict.fromkeys((*hosts, *_HERE))]
    if not hosts:
        raise ConfigError("expected a host name or address that nodes call the server by, got none")
    taken = [keys / name for name in (SERVER, SERVER_KEY) if (keys / name).exists()]
    if taken and not overwrite:
        raise ConfigError(f"{taken[0]} is there already; replace the server's certificate with --overwrite")
    files: dict[str, bytes] = {}
    if any((keys / name).exists() for name in (AUTHORITY, AUTHORITY_KEY)):
        signer, key = _authority(keys)
    else:
        key = _new_key()
        signer = _certificate("polyfed federation", key, None, key, 10 * _DAYS)
        files |= {AUTHORITY: signer.public_bytes(form.Encoding.PEM), AUTHORITY_KEY: _private_bytes(key)}
    own = _new_key()
    certificate = _certificate(hosts[0], own, signer, key, _DAYS, names)
    files |= {SERVER: certificate.public_bytes(form.Encoding.PEM), SERVER_KEY: _private_bytes(own)}
    for name, data in files.items():
        _write(keys / name, data, private=name in (AUTHORITY_KEY, SERVER_KEY))
    return [keys / name for name in files]


def make_node_key(path: str | Path, overwrite: bool = False) -> list[Path]:
    """Write a node's key pair: `path` and, beside it, `path`.pub, both in OpenSSH's form, as SuperNodes read them.

    Raises:
        ConfigError: one of the files is there already, or `cryptography` is missing.
    """
    require_package("cryptography", "making keys")
    from cryptography.hazmat.primitives import serialization as form

    check_name(path)
    private = Path(path)
    public = private.with_name(f"{private.name}.pub")
    for file in (private, public):
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} is there already; replace the node's keys with --overwrite")
    key = _new_key()
    _write(private, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()), private=True)
    _write(public, key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH) + b"\n")
    return [private, public]


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private_bytes(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    """The authority that the folder holds, good for as long as a new certificate."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
        public = certificate.public_key()
        ends = certificate.not_valid_after_utc
        certificate.subject.rfc4514_string()  # read now, as what is looked at later may be damaged
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ConfigError(f"expected an authority in {folder}, got files that cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"expected {AUTHORITY} and {AUTHORITY_KEY} in {folder}, got {error.strerror}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != public:
        raise ConfigError(f"expected {AUTHORITY_KEY} to be the key of {AUTHORITY} in {folder}, got another one")
    if ends < datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=_DAYS):
        raise ConfigError(
            f"expected an authority good for {_DAYS} days or more in {folder}, got one that ends on {ends.date()}"
        )
    return certificate, key


def _certificate(
    name: str,
    own: EllipticCurvePrivateKey,
    signer: x509.Certificate | None,
    key: EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    """A certificate of `own` for `hosts`, signed with `key`; without a `signer` that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    authority = signer is None
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"encipher_only": False, "decipher_only": False}
    usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # the form's own limit
    public = own.public_key()
    signing = key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True)
        .add_extension(x509.KeyUsage(**usage), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing), False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return builder.sign(key, hashes.SHA384())


def _subject_name(host: str) -> x509.GeneralName:
    """A host in a certificate: an IP address or a DNS name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if host.isascii() and len(host) <= 253 and all(map(_NAME.fullmatch, host.removesuffix(".").split("."))):
            return x509.DNSName(host.removesuffix("."))
        raise ConfigError(f"expected a host name (fl.example.org) or an address (10.0.0.5), got '{host}'") from None


def _write(path: Path, data: bytes, private: bool = False) -> None:
    """A file as a whole; a private one is never readable by others, not for a moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with private_files() if private else contextlib.nullcontext():
            atomic_write(path, data)
    except OSError as error:
        raise ConfigError(f"expected to write {path}, got {error.strerror}") from None
