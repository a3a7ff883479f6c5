# SPDX-License-Identifier: Apache-2.0
"""The archive of an upgrade's image."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import tarfile
from pathlib import Path

from tests.e2e.next_image import write_next_image


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def docker_archive(target: Path, layers: list[bytes]) -> None:
    """As buildah writes it: layers by their digests, and links to them."""
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    config = {
        "config": {"User": "1000:1000"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{d}" for d in digests]},
    }
    with tarfile.open(target, "w") as tar:
        for digest, layer in zip(digests, layers, strict=True):
            add(tar, f"{digest}.tar", layer)
        add(tar, "config.json", json.dumps(config).encode())
        link = tarfile.TarInfo("first/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, f"../{digests[0]}.tar"
        tar.addfile(link)
        names = ["first/layer.tar", *(f"{digest}.tar" for digest in digests[1:])]
        listed = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]
        add(tar, "manifest.json", json.dumps(listed).encode())


def test_it_names_the_old_layers_and_brings_the_new_one_alone(tmp_path: Path) -> None:
    old = [secrets.token_bytes(3001), secrets.token_bytes(517)]
    docker_archive(tmp_path / "base.tar", old)
    content = secrets.token_hex(9).encode()
    write_next_image(tmp_path / "base.tar", tmp_path / "next.tar", "localhost/x:2", "opt/RELEASE", content)
    with tarfile.open(tmp_path / "next.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    for name, data in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"

    def blob(entry: dict[str, object]) -> bytes:
        data = files[f"blobs/{str(entry['digest']).replace(':', '/')}"]
        assert entry["size"] == len(data)
        return data

    (listed,) = json.loads(files["index.json"])["manifests"]
    assert listed["annotations"] == {"io.containerd.image.name": "localhost/x:2"}
    manifest = json.loads(blob(listed))
    config = json.loads(blob(manifest["config"]))
    expected = [(f"sha256:{hashlib.sha256(layer).hexdigest()}", len(layer)) for layer in old]
    assert [(layer["digest"], layer["size"]) for layer in manifest["layers"][:-1]] == expected
    assert not any(digest.removeprefix("sha256:") in name for digest, _ in expected for name in files)
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert config["config"] == {"User": "1000:1000"}
    with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][-1]))) as layer:
        assert layer.getnames() == ["opt/RELEASE"]
        assert layer.extractfile("opt/RELEASE").read() == content  # type: ignore[union-attr]
