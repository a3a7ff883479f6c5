# SPDX-License-Identifier: Apache-2.0
"""Folders that stand for the volumes of a pod, and the files that Kubernetes would mount."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.paths import PathRewriter
from kvcache_operator.render import Manifest

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket: `sun_path` has 108 bytes, the last one zero."""
_SOCKET_NAME_BYTES = 36
"""The longest name of a socket in a volume: ZMQ's sockets of vLLM are named by a UUID."""

SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108
"""Where POSIX shared memory lives. It cannot be anywhere else, so this mount is left to the machine."""


def volumes_root(state_dir: Path, pod_spec: Manifest) -> Path:
    """The folder for the volumes: in the state folder, or a temporary one with a short name where the path of
    a socket in an emptyDir would be too long otherwise.
    """
    inside = state_dir / "volumes"
    names = [volume["name"] for volume in pod_spec.get("volumes", ()) if "emptyDir" in volume]
    longest = max((len(os.fsencode(inside / name)) for name in names), default=0)
    if longest + 1 + _SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES:
        return inside
    return Path(tempfile.mkdtemp(prefix="kvc-"))


def volume_folders(pod_spec: Manifest, root: Path, claims: Mapping[str, Path]) -> dict[str, Path]:
    """The folder of each volume: one of its own below `root`, or the one that stands for its claim.

    Raises:
        LocalError: a claim without a folder, or a kind of volume that a local run has not.
    """
    folders = {}
    for volume in _own_volumes(pod_spec):
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if claim not in claims:
                raise LocalError(
                    f"the claim {claim} has no folder here; give it one with --claim {claim}=FOLDER"
                )
            folders[name] = claims[claim]
        elif volume.keys() & {"emptyDir", "configMap", "secret"}:
            folders[name] = root / name
        else:
            raise LocalError(
                f"volume {name} is of a kind that no local run has; use emptyDir, configMap, secret or claim"
            )
    return folders


def mount_folders(pod_spec: Manifest, folders: Mapping[str, Path]) -> dict[str, str]:
    """The folder of each mount path; in the pods that we render, containers agree on them."""
    mounts: dict[str, str] = {}
    for container in pod_spec["containers"]:
        for mount in container.get("volumeMounts", ()):
            path = mount["mountPath"]
            if path == SHARED_MEMORY_MOUNT:
                continue
            folder = str(folders[mount["name"]])
            if mounts.setdefault(path, folder) != folder:
                raise LocalError(
                    f"two volumes are mounted at {path}; a local run has one set of paths for all containers"
                )
    return mounts


def fill_volumes(
    pod_spec: Manifest,
    folders: Mapping[str, Path],
    objects: Mapping[tuple[str, str], Manifest],
    rewrite: PathRewriter,
) -> None:
    """Makes the folders and writes the files of ConfigMaps and Secrets, readable by this user alone.

    Args:
        pod_spec: The pod.
        folders: Folder of each volume.
        objects: ConfigMaps and Secrets by kind and name.
        rewrite: Applied to the texts of ConfigMaps; a Secret's bytes are nobody's business.

    Raises:
        LocalError: the pod names a ConfigMap or Secret that is not among `objects`.
    """
    for volume in _own_volumes(pod_spec):
        if "persistentVolumeClaim" in volume:
            continue
        folder = folders[volume["name"]]
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        for name, content in _files(volume, objects, rewrite).items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)


def _own_volumes(pod_spec: Manifest) -> list[Manifest]:
    """All volumes but the one for shared memory."""
    mounts = (mount for container in pod_spec["containers"] for mount in container.get("volumeMounts", ()))
    shared = {mount["name"] for mount in mounts if mount["mountPath"] == SHARED_MEMORY_MOUNT}
    return [volume for volume in pod_spec.get("volumes", ()) if volume["name"] not in shared]


def _files(
    volume: Manifest, objects: Mapping[tuple[str, str], Manifest], rewrite: PathRewriter
) -> dict[str, bytes]:
    if "configMap" in volume:
        data = lookup(objects, "ConfigMap", volume["configMap"]["name"]).get("data", {})
        return {key: rewrite(text).encode() for key, text in data.items()}
    if "secret" in volume:
        data = lookup(objects, "Secret", volume["secret"]["secretName"]).get("data", {})
        return {key: base64.b64decode(text) for key, text in data.items()}
    return {}


def lookup(objects: Mapping[tuple[str, str], Manifest], kind: str, name: str) -> dict[str, Any]:
    """The object of that kind and name; raises LocalError where a local run has none."""
    try:
        return objects[kind, name]
    except KeyError:
        raise LocalError(
            f"the pod names the {kind} {name}, which no local run has; write the value itself"
        ) from None
