# SPDX-License-Identifier: Apache-2.0
"""The image of the container that holds a pod's namespaces: Debian's static `catatonit`, as an archive of
docker's form, written without any tool for images."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

PROGRAM = Path("/usr/bin/catatonit")


def write_pause_image(archive: Path, name: str) -> None:
    """Writes the archive of an image called `name` with one layer; equal bytes for equal programs."""
    layer = _tar({"catatonit": (PROGRAM.read_bytes(), 0o755)})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/catatonit", "-P"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    files = {"layer.tar": layer, config_name: config, "manifest.json": manifest}
    archive.write_bytes(_tar({path: (content, 0o644) for path, content in files.items()}))


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
