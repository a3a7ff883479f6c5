# SPDX-License-Identifier: Apache-2.0
"""Lists and verifies a directory of objects, whoever uses it meanwhile. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvcache.storage.inspection import (
    SOUND,
    UNCHECKED,
    InspectedObject,
    Inspection,
    check_payload,
    form_of,
    seal_of,
)
from kvcache.storage.object_format import HEADER_BYTES, ObjectFormatError, decode_header
from kvcache.storage.sealing import Sealer
from kvcache.storage.tiers.disk.ledger import FILE as LEDGER_FILE
from kvcache.storage.tiers.disk.names import LAYOUT, LAYOUT_PREFIX, PART_SUFFIX, ObjectName, parse_name


def inspect_directory(directory: Path, *, verify: bool = True, sealer: Sealer | None = None) -> Inspection:
    """All that lies in a directory as the configuration names it.

    Args:
        directory: of the disk tier.
        verify: read payloads and compare their checksums; else headers alone.
        sealer: to open sealed payloads too.

    Raises:
        ValueError: it holds no objects of this tier, or cannot be read.
    """
    folder = directory / LAYOUT
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        others = sorted(entry.name for entry in directory.iterdir() if _is_other_layout(entry))
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be read ({error.strerror}); name a directory of the disk tier"
        ) from error
    objects = list(_inspect(folder, names, verify, sealer))
    parts = [name for name in names if parse_name(name, PART_SUFFIX) is not None]
    ours = {*(obj.name for obj in objects), *parts, LEDGER_FILE}
    return Inspection(
        place=str(directory),
        objects=objects,
        stored_bytes=sum(obj.stored_bytes for obj in objects),
        parts=parts,
        # One that left meanwhile is not unknown.
        unknown=[name for name in names if name not in ours and parse_name(name) is None],
        other_layouts=others,
    )


def _inspect(
    folder: Path, names: list[str], verify: bool, sealer: Sealer | None
) -> Iterator[InspectedObject]:
    for file in names:
        raw = parse_name(file)
        if raw is None:
            continue
        name = ObjectName(raw)
        try:
            with (folder / file).open("rb", buffering=0) as opened:
                yield _inspect_file(name, opened.fileno(), verify, sealer)
                # What was read for a look does not push out what is read for work.
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield _described(
                name, state="DiskReadFailed", detail=error.strerror or str(error), stored_bytes=0
            )


def _inspect_file(name: ObjectName, fd: int, verify: bool, sealer: Sealer | None) -> InspectedObject:
    status = os.fstat(fd)
    known: dict[str, object] = {"stored_bytes": status.st_size, "last_used": status.st_mtime}
    try:
        header = decode_header(os.pread(fd, HEADER_BYTES, 0))
        known |= {"form": form_of(header), "sealed_by": seal_of(header)}
        told = (header.key, header.parent, header.tenant, header.num_tokens, header.payload_bytes)
        if told != (name.key, name.parent, name.tenant, name.num_tokens, name.payload_bytes):
            raise ObjectFormatError("ObjectMismatch", "its name and its header do not say the same")
        if status.st_size != name.file_bytes:
            raise ObjectFormatError(
                "ObjectTruncated", f"{status.st_size} bytes; it must have {name.file_bytes}"
            )
        if verify:
            check_payload(header, _read_payload(fd, header.payload_bytes), sealer)
    except ObjectFormatError as error:
        return _described(name, state=error.reason, detail=str(error), **known)
    return _described(name, state=SOUND if verify else UNCHECKED, **known)


def _read_payload(fd: int, num_bytes: int) -> memoryview:
    payload = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes and (got := os.preadv(fd, [payload[done:]], HEADER_BYTES + done)):
        done += got
    return payload[:done]


def _described(name: ObjectName, *, state: str, **known: object) -> InspectedObject:
    key = name.key
    fields: dict[str, object] = {
        "name": name.file,
        "state": state,
        "chunk_hash": key.chunk_hash.hex(),
        "namespace": key.namespace.hex(),
        "rank": key.rank,
        "kv_group": key.kv_group,
        "tenant": name.tenant.hex(),
        "parent": name.parent.hex(),
        "num_tokens": name.num_tokens,
        "payload_bytes": name.payload_bytes,
    }
    return InspectedObject(**fields, **known)  # type: ignore[arg-type]


def _is_other_layout(entry: Path) -> bool:
    return entry.name.startswith(LAYOUT_PREFIX) and entry.name != LAYOUT and entry.is_dir()
