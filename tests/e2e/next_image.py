# SPDX-License-Identifier: Apache-2.0
"""The image of an upgrade: a node's image with one more small layer, as an archive that holds nothing else.

An archive of OCI's layout names its layers by digest, and containerd looks for those that it brings not
along in its own store: the gigabytes of the image that the node has already are not carried a second time.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import tarfile
from pathlib import Path
from typing import Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_NAME = "io.containerd.image.name"
"""Annotation by which containerd names what it imports."""


def write_next_image(base: Path, target: Path, name: str, file: str, content: bytes) -> None:
    """Writes the archive of an image like the one in `base`, with one file more.

    Args:
        base: archive of docker's form with one image, whose layers are not compressed.
        target: the archive to write.
        name: the new image's, as containerd keeps it.
        file: path of the file inside, such as `opt/kvcache/RELEASE`.
    """
    with tarfile.open(base) as tar:
        (listed,) = json.loads(_read(tar, "manifest.json"))
        config: dict[str, Any] = json.loads(_read(tar, listed["Config"]))
        sizes = [_size(tar, layer) for layer in listed["Layers"]]
    layers = [
        {"mediaType": _LAYER, "digest": digest, "size": size}
        for digest, size in zip(config["rootfs"]["diff_ids"], sizes, strict=True)
    ]
    blobs: dict[str, bytes] = {}

    def blob(media_type: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    added = blob(_LAYER, _tar({file: content}))
    config["rootfs"]["diff_ids"].append(added["digest"])
    config.setdefault("history", []).append({"created_by": f"ADD {file}"})
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(_CONFIG, json.dumps(config).encode()),
        "layers": [*layers, added],
    }
    entry = blob(_MANIFEST, json.dumps(manifest).encode())
    index = {"schemaVersion": 2, "manifests": [{**entry, "annotations": {_NAME: name}}]}
    layout = {"imageLayoutVersion": "1.0.0"}
    files = {"oci-layout": json.dumps(layout).encode(), "index.json": json.dumps(index).encode(), **blobs}
    target.write_bytes(_tar(files))


def _size(tar: tarfile.TarFile, name: str) -> int:
    member = tar.getmember(name)
    while member.issym():
        member = tar.getmember(posixpath.normpath(f"{posixpath.dirname(member.name)}/{member.linkname}"))
    return member.size


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    opened = tar.extractfile(name)
    if opened is None:
        raise ValueError(f"{name} is no file")
    return opened.read()


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
