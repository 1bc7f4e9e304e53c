"""Certificates that TLS takes, keys that Flower takes, and nothing overwritten unasked."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from polyfed.errors import ConfigError

pytest.importorskip("cryptography", reason="the extra 'flower' is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.deploy.tls import make_node_key, make_server_certificate


def answers(folder: Path, name: str, authority: Path) -> str:
    """What a client that trusts `authority` gets from a server with the folder's certificate, called by `name`."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.pem", folder / "server.key")
    calling = ssl.create_default_context(cafile=str(authority))
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                with serving.wrap_socket(listener.accept()[0], server_side=True) as taken:
                    taken.sendall(b"hello")
            except OSError:
                pass  # the caller hung up

        server = threading.Thread(target=serve)
        server.start()
        try:
            plain = socket.create_connection(listener.getsockname())
            with plain, calling.wrap_socket(plain, server_hostname=name) as secure:
                return secure.recv(5).decode()
        finally:
            server.join()


def test_tls_takes_the_certificate_for_its_hosts_and_for_no_other(tmp_path: Path) -> None:
    files = make_server_certificate(tmp_path, ["localhost", "127.0.0.1", "fl.example.org"])
    assert [file.name for file in files] == ["ca.crt", "ca.key", "server.pem", "server.key"]
    for name in ("localhost", "127.0.0.1", "fl.example.org"):
        assert answers(tmp_path, name, tmp_path / "ca.crt") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        answers(tmp_path, "elsewhere.example.org", tmp_path / "ca.crt")
    make_server_certificate(tmp_path / "other", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError):
        answers(tmp_path, "localhost", tmp_path / "other" / "ca.crt")


def test_the_certificate_says_what_was_asked_for(tmp_path: Path) -> None:
    make_server_certificate(tmp_path, ["a.example.org", "10.0.0.5", "::1"])
    server, authority = (x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in ("server.pem", "ca.crt"))
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["a.example.org", "localhost"]
    addresses = [ipaddress.ip_address(text) for text in ("10.0.0.5", "::1", "127.0.0.1")]
    assert named.get_values_for_type(x509.IPAddress) == addresses
    assert isinstance(key := server.public_key(), ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp384r1"
    server.verify_directly_issued_by(authority)
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 365
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_private_files_are_the_owners_alone(tmp_path: Path) -> None:
    make_server_certificate(tmp_path, ["localhost"])
    make_node_key(tmp_path / "node")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"ca.key", "server.key", "node"}
    assert not any(modes[name] & 0o022 for name in modes)
    assert len(modes) == 6, "no temporary file is left"


def test_a_renewed_certificate_keeps_the_authority(tmp_path: Path) -> None:
    make_server_certificate(tmp_path, ["localhost"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"server\.pem is there already; replace .* certificate with --overwrite"):
        make_server_certificate(tmp_path, ["localhost"])
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert [file.name for file in make_server_certificate(tmp_path, ["fl.example.org"], overwrite=True)] == [
        "server.pem",
        "server.key",
    ]
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    assert answers(tmp_path, "fl.example.org", tmp_path / "ca.crt") == "hello"


def test_half_an_authority_or_a_wrong_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_server_certificate(tmp_path, ["localhost"])
    (tmp_path / "ca.key").rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"expected ca.crt and ca.key in .*, got No such file"):
        make_server_certificate(tmp_path, ["localhost"], overwrite=True)
    (tmp_path / "ca.key").write_bytes((tmp_path / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"expected ca.key to be the key of ca.crt .*, got another one"):
        make_server_certificate(tmp_path, ["localhost"], overwrite=True)
    (tmp_path / "kept").replace(tmp_path / "ca.key")
    monkeypatch.setattr("polyfed.deploy.tls._DAYS", 9999)
    with pytest.raises(ConfigError, match="good for 9999 days or more"):
        make_server_certificate(tmp_path, ["localhost"], overwrite=True)


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        *(([host], "expected a host name") for host in ("", "two words", "-a.org", "fl.example.org:8000", "ä.org")),
        ([], "expected a host name or address that nodes call the server by, got none"),
    ],
)
def test_no_host_is_refused(hosts: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        make_server_certificate(tmp_path / "keys", hosts)
    assert not (tmp_path / "keys").exists()


def test_a_nodes_key_pair_belongs_together(tmp_path: Path) -> None:
    private, public = make_node_key(tmp_path / "keys" / "node")
    assert public.name == "node.pub"
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert serialization.load_ssh_public_key(public.read_bytes()) == key.public_key()
    with pytest.raises(ConfigError, match="is there already; replace the node's keys with --overwrite"):
        make_node_key(private)
    before = private.read_bytes()
    make_node_key(private, overwrite=True)
    assert private.read_bytes() != before
