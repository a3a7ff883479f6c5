# SPDX-License-Identifier: Apache-2.0
"""What lies in a place that keeps objects, without an engine: `kvcache inspect` shows it.

A place is a directory of the disk tier, or a URL of a remote store whose scheme is in `SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvcache.storage.object_format import ObjectHeader, unseal_payload, verify_payload
from kvcache.storage.sealing import Sealer, key_name

SOUND = "Ok"
UNCHECKED = "Unchecked"


class InspectedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object. Digests are in hex."""

    name: str
    """Of the file, or the key in the store."""
    state: str
    """`Ok`: all checksums fit. `Unchecked`: nobody asked. Else the reason why it would not be served."""
    detail: str = ""
    stored_bytes: int
    """Header, payload and what fills it up."""
    chunk_hash: str = ""
    namespace: str = ""
    rank: int = 0
    kv_group: int = 0
    tenant: str = ""
    parent: str = ""
    num_tokens: int = 0
    payload_bytes: int = 0
    form: str = ""
    """Shape and dtype: `32 layers x 2 x 1024 bfloat16`."""
    sealed_by: str = ""
    """Id of the key."""
    last_used: float | None = None
    """Seconds of the epoch, where the place knows it."""

    @property
    def bad(self) -> bool:
        return self.state not in (SOUND, UNCHECKED)


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """All that a place holds."""

    place: str
    objects: list[InspectedObject]
    stored_bytes: int
    parts: list[str] = []
    """Being written, or left by a writer that died."""
    unknown: list[str] = []
    """What is none of ours, left alone."""
    other_layouts: list[str] = []
    """Folders of other versions, set aside."""

    @property
    def bad(self) -> list[InspectedObject]:
        return [obj for obj in self.objects if obj.bad]


Inspector = Callable[[str, bool, Sealer | None], Inspection]
"""Of a place, whether to read and verify payloads, and the keys of sealed ones."""


def inspect_place(place: str, *, verify: bool = True, sealer: Sealer | None = None) -> Inspection:
    """Lists a place, and verifies what lies there.

    Args:
        place: a directory, or a URL.
        verify: read payloads and compare their checksums.
        sealer: to open sealed payloads too; without it their checksums are compared alone.

    Raises:
        ValueError: there is no such place, or it cannot be reached.
    """
    scheme, separator, _ = place.partition("://")
    if not separator:
        return _inspect_directory(place, verify, sealer)
    inspector = SCHEMES.get(scheme)
    if inspector is None:
        known = ", ".join(sorted(f"{name}://" for name in SCHEMES)) or "directories alone"
        raise ValueError(f"{place}: no store is known by {scheme}://; there are {known}")
    return inspector(place, verify, sealer)


def _inspect_remote(place: str, verify: bool, sealer: Sealer | None) -> Inspection:
    from kvcache.storage.tiers.remote_inspect import inspect_remote

    return inspect_remote(place, verify, sealer)


SCHEMES: dict[str, Inspector] = dict.fromkeys(
    ("valkey", "valkeys", "redis", "rediss", "s3", "mooncake"), _inspect_remote
)
"""By the scheme of the URL."""


def form_of(header: ObjectHeader) -> str:
    """Shape and dtype in words."""
    planes = f"{header.kv_planes} x " if header.kv_planes > 1 else ""
    return f"{header.num_layers} layers x {planes}{header.hidden} {header.dtype}"


def seal_of(header: ObjectHeader) -> str:
    """Id of the key that sealed an object; empty for a plain one."""
    return key_name(header.seal.key_id) if header.seal is not None else ""


def check_payload(header: ObjectHeader, payload: memoryview, sealer: Sealer | None) -> None:
    """Compares a payload with its header, and opens it where there are keys. Its memory is undefined after.

    Raises:
        ObjectFormatError: it would not be served.
    """
    verify_payload(header, payload)
    if header.seal is not None and sealer is not None:
        unseal_payload(header, payload, sealer)


def _inspect_directory(place: str, verify: bool, sealer: Sealer | None) -> Inspection:
    from kvcache.storage.tiers.disk.inspect import inspect_directory

    return inspect_directory(Path(place), verify=verify, sealer=sealer)
