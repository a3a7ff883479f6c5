# SPDX-License-Identifier: Apache-2.0
"""Keys, certificates and kubeconfigs of one cluster; valid for a month, and for nothing but that cluster."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 30
SERVICE_ADDRESS = "10.96.0.1"
"""Where pods find the API server: the first address of the services' range."""
NODE = "node"
"""Name of the only node."""

_MASTERS = "system:masters"
_USERS = {
    # name: (organisation, common name), by which RBAC and the node authoriser know who asks
    "admin": (_MASTERS, "admin"),
    "controller-manager": (None, "system:kube-controller-manager"),
    "scheduler": (None, "system:kube-scheduler"),
    "proxy": (None, "system:kube-proxy"),
    "kubelet": ("system:nodes", f"system:node:{NODE}"),
}
_DNS_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True)
class Pki:
    """Where the files lie: `NAME.crt`, `NAME.key`, and `NAME.conf`, a kubeconfig, for each user."""

    folder: Path

    def certificate(self, name: str) -> str:
        return str(self.folder / f"{name}.crt")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.conf"


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_pki(folder: Path, address: str, port: int) -> Pki:
    """Makes all files of a cluster whose API server listens at `address` and `port` (IPv4).

    Two authorities: `ca` for servers and users, `front-proxy-ca` for what the API server says when it passes
    requests on to another one. `sa` is the key pair that signs the tokens of service accounts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    pki = Pki(folder)
    authority = _make_authority(pki, "ca")
    front_proxy = _make_authority(pki, "front-proxy-ca")
    addresses = [address, "127.0.0.1", SERVICE_ADDRESS]
    _issue(pki, "apiserver", (None, "kube-apiserver"), authority, list(_DNS_NAMES), addresses)
    _issue(pki, "apiserver-kubelet-client", (_MASTERS, "kube-apiserver-kubelet-client"), authority)
    _issue(pki, "front-proxy-client", (None, "front-proxy-client"), front_proxy)
    for name, subject in _USERS.items():
        _issue(pki, name, subject, authority, [NODE], [address, "127.0.0.1"])
        write_kubeconfig(pki, name, f"https://{address}:{port}")
    _write_service_account_key(pki)
    return pki


def write_kubeconfig(pki: Pki, user: str, server: str, name: str | None = None) -> Path:
    """Writes `name`.conf (default: `user`.conf) with which `user` speaks to the server at this URL."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": server, "certificate-authority": pki.certificate("ca")}}
        ],
        "users": [
            {"name": "u", "user": {"client-certificate": pki.certificate(user), "client-key": pki.key(user)}}
        ],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = pki.kubeconfig(name or user)
    file.write_text(yaml.safe_dump(config))
    return file


def _make_authority(pki: Pki, name: str) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(subject, subject, key).add_extension(usage, critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write(pki, name, certificate, key)
    return _Authority(certificate, key)


def _issue(
    pki: Pki,
    name: str,
    subject: tuple[str | None, str],
    authority: _Authority,
    dns_names: list[str] | None = None,
    addresses: list[str] | None = None,
) -> None:
    organisation, common_name = subject
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organisation is not None:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(x509.Name(attributes), authority.certificate.subject, key)
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    alternatives: list[x509.GeneralName] = [x509.DNSName(dns) for dns in dns_names or ()]
    alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses or ()]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _write(pki, name, builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _write(pki: Pki, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    Path(pki.certificate(name)).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(Path(pki.key(name)), key)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    file.touch(mode=0o600)
    file.write_bytes(text)


def _write_service_account_key(pki: Pki) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(Path(pki.key("sa")), key)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (pki.folder / "sa.pub").write_bytes(public)
