# SPDX-License-Identifier: Apache-2.0
"""Parts of the node's cluster that need no cluster."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.cluster import pause
from tests.cluster.dns import addresses, answer
from tests.cluster.node import cni_config, containerd_config
from tests.cluster.pki import SERVICE_ADDRESS, make_pki
from tests.cluster.processes import ClusterError, Processes


def entry(name: str, **rest: object) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": "ns"}, **rest}


KNOWN = addresses(
    [entry("web", spec={"clusterIP": "10.96.3.4"}), entry("db", spec={"clusterIP": "None"})],
    [entry("db", subsets=[{"addresses": [{"ip": "10.244.0.7"}, {"ip": "10.244.0.9"}]}]), entry("web")],
)


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("web.ns.svc.cluster.local", "A", ["10.96.3.4"]),
        ("WEB.ns.svc.cluster.local", "A", ["10.96.3.4"]),
        ("db.ns.svc.cluster.local", "A", ["10.244.0.7", "10.244.0.9"]),
        ("web.ns.svc.cluster.local", "AAAA", []),
    ],
)
def test_services_are_found_by_name(name: str, kind: str, found: list[str]) -> None:
    response = dns.message.from_wire(answer(dns.message.make_query(name, kind), KNOWN).to_wire())
    assert response.rcode() == dns.rcode.NOERROR
    assert sorted(str(item) for rrset in response.answer for item in rrset) == found


@pytest.mark.parametrize(
    "name", ["web.svc.cluster.local", "nosuch.ns.svc.cluster.local", "web.ns.example", "web"]
)
def test_other_names_are_not(name: str) -> None:
    assert answer(dns.message.make_query(name, dns.rdatatype.A), KNOWN).rcode() == dns.rcode.NXDOMAIN


def test_certificates_are_signed_by_their_authority_and_name_the_address(tmp_path: Path) -> None:
    pki = make_pki(tmp_path, "10.222.0.1", 6443)
    read = {
        name: x509.load_pem_x509_certificate(Path(pki.certificate(name)).read_bytes())
        for name in ("ca", "front-proxy-ca", "apiserver", "kubelet", "front-proxy-client")
    }
    for name, authority in (("apiserver", "ca"), ("kubelet", "ca"), ("front-proxy-client", "front-proxy-ca")):
        read[name].verify_directly_issued_by(read[authority])
    with pytest.raises(ValueError, match="ssuer"):
        read["front-proxy-client"].verify_directly_issued_by(read["ca"])
    names = read["apiserver"].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {
        "10.222.0.1",
        "127.0.0.1",
        SERVICE_ADDRESS,
    }
    assert isinstance(read["kubelet"].public_key(), ec.EllipticCurvePublicKey)
    assert Path(pki.key("ca")).stat().st_mode & 0o077 == 0


def test_the_pause_image_is_one_layer_with_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, archive = tmp_path / "catatonit", tmp_path / "pause.tar"
    program.write_bytes(secrets.token_bytes(1000))
    monkeypatch.setattr(pause, "PROGRAM", program)
    pause.write_pause_image(archive, "localhost/pause:1")
    with tarfile.open(archive) as tar:
        files = {member.name: _content(tar, member) for member in tar}
    (manifest,) = json.loads(files["manifest.json"])
    config = json.loads(files[manifest["Config"]])
    layer = files[manifest["Layers"][0]]
    assert manifest["RepoTags"] == ["localhost/pause:1"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert config["config"]["User"] != "0"
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        (member,) = list(tar)
        assert (_content(tar, member), member.mode) == (program.read_bytes(), 0o755)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = tar.extractfile(member)
    assert opened is not None
    return opened.read()


def test_containerd_and_cni_keep_all_in_the_clusters_folder(tmp_path: Path) -> None:
    config = tomllib.loads(containerd_config(tmp_path / "data", tmp_path / "cni"))
    assert config["root"] == str(tmp_path / "data")
    assert config["plugins"]["io.containerd.grpc.v1.cri"]["cni"]["conf_dir"] == str(tmp_path / "cni")
    bridge = cni_config(tmp_path / "given")["plugins"][0]  # type: ignore[index]
    assert bridge["ipam"]["dataDir"] == str(tmp_path / "given")


def test_a_program_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    words = secrets.token_hex(8)
    processes.start("sleeper", ["sleep", "60"])
    processes.start("talker", ["sh", "-c", f"echo {words}; exit 3"])
    try:
        with pytest.raises(ClusterError, match=rf"talker has ended with code 3.*{words}"):
            processes.wait("sleeper", lambda: False, 30)
        pid = processes.pids()["sleeper"]
    finally:
        processes.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="thing cannot be started"):
        Processes(tmp_path).start("thing", [str(tmp_path / "nosuch")])


def test_orphans_are_collected_and_own_children_left() -> None:
    """In a process of its own, since it collects whatever child has ended."""
    code = """
import os, subprocess, time
from tests.cluster.init import collect_orphans
orphan = os.spawnlp(os.P_NOWAIT, "true", "true")
time.sleep(0.5)
collect_orphans(set())
try:
    os.waitpid(orphan, 0)
except ChildProcessError:
    pass
else:
    raise SystemExit("the orphan was left")
own = subprocess.Popen(["sh", "-c", "exit 7"])
time.sleep(0.5)
collect_orphans({own.pid})
raise SystemExit(own.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 7, done.stderr
