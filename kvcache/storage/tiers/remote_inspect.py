# SPDX-License-Identifier: Apache-2.0
"""Lists and verifies a remote store of objects, whoever uses it meanwhile. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

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
from kvcache.storage.tiers.remote_client import Listed, Load, Read, RemoteClient, RemoteError, key_of
from kvcache.storage.tiers.remote_url import make_client, parse_url
from kvcache.tokens.keys import CacheEngineKey

STEP_S = 30.0
"""For a page of the list, and for each object."""
MAX_OBJECT_BYTES = 1 << 30
"""A larger one is none of ours; it is not read."""
_ONE = Load(1, 1)


def inspect_remote(place: str, verify: bool = True, sealer: Sealer | None = None) -> Inspection:
    """All that lies in a remote store under our names.

    Args:
        place: URL as `kvcache.storage.tiers.remote_url` has it.
        verify: read payloads and compare their checksums; else headers alone.
        sealer: to open sealed payloads too.

    Raises:
        ValueError: the URL names no store, or it cannot be reached.
    """
    config = parse_url(place)
    if "deadline_ms" not in config.model_fields_set:
        config = config.model_copy(update={"deadline_ms": int(STEP_S * 1000)})
    client = make_client(config)
    objects: list[InspectedObject] = []
    unknown: list[str] = []
    try:
        for spot in client.places():
            client.ping(spot, time.monotonic() + STEP_S)
        for spot in client.places():
            for page in client.pages(spot, None, STEP_S):
                ours = []
                for listed in page:
                    key = key_of(listed.name)
                    if key is None or not HEADER_BYTES < listed.num_bytes <= MAX_OBJECT_BYTES:
                        unknown.append(listed.name)
                    else:
                        ours.append((listed, key))
                objects += _whole(client, spot, ours, sealer) if verify else _headers(client, spot, ours)
    except RemoteError as error:
        raise ValueError(f"{place}: {error.detail}") from error
    finally:
        client.close()
        client.release()
    stored = sum(obj.stored_bytes for obj in objects)
    return Inspection(place=place, objects=objects, stored_bytes=stored, unknown=unknown)


def _headers(
    client: RemoteClient, spot: str, ours: list[tuple[Listed, CacheEngineKey]]
) -> Iterator[InspectedObject]:
    names = [listed.name for listed, _ in ours]
    headers = client.headers(spot, names, time.monotonic() + STEP_S) if names else []
    for (listed, key), header in zip(ours, headers, strict=True):
        if header is not None:  # else it left meanwhile
            yield _inspected(listed, key, memoryview(header), None, None)


def _whole(
    client: RemoteClient, spot: str, ours: list[tuple[Listed, CacheEngineKey]], sealer: Sealer | None
) -> Iterator[InspectedObject]:
    for listed, key in ours:
        read = Read(0, listed.name, memoryview(bytearray(listed.num_bytes - HEADER_BYTES)))
        for _, found in client.read(spot, iter([read]), time.monotonic() + STEP_S, _ONE):
            if found:
                yield _inspected(listed, key, read.header, read.target, sealer)


def _inspected(
    listed: Listed,
    key: CacheEngineKey,
    header_bytes: memoryview,
    payload: memoryview | None,
    sealer: Sealer | None,
) -> InspectedObject:
    """Of an object; without its payload, what its header says."""
    known: dict[str, object] = {}
    state, detail = SOUND if payload is not None else UNCHECKED, ""
    try:
        header = decode_header(header_bytes)
        known = {
            "tenant": header.tenant.hex(),
            "parent": header.parent.hex(),
            "num_tokens": header.num_tokens,
            "payload_bytes": header.payload_bytes,
            "form": form_of(header),
            "sealed_by": seal_of(header),
        }
        if header.key != key:
            raise ObjectFormatError("ObjectMismatch", "its name and its header do not say the same")
        if header.payload_bytes != listed.num_bytes - HEADER_BYTES:
            raise ObjectFormatError(
                "ObjectTruncated",
                f"{listed.num_bytes} bytes; it must have {HEADER_BYTES + header.payload_bytes}",
            )
        if payload is not None:
            check_payload(header, payload, sealer)
    except ObjectFormatError as error:
        state, detail = error.reason, str(error)
    return InspectedObject(
        name=listed.name,
        state=state,
        detail=detail,
        stored_bytes=listed.num_bytes,
        chunk_hash=key.chunk_hash.hex(),
        namespace=key.namespace.hex(),
        rank=key.rank,
        kv_group=key.kv_group,
        **known,  # type: ignore[arg-type]
    )
