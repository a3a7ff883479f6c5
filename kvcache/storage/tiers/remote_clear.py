# SPDX-License-Identifier: Apache-2.0
"""Removing from a remote store what is in a scope, whoever wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcache.storage.object_format import HEADER_BYTES, ObjectFormatError, decode_header
from kvcache.storage.tier import NO_TENANT, Cleared, ClearScope
from kvcache.storage.tiers.remote_client import Listed, RemoteClient, RemoteError, key_of, name_of
from kvcache.tokens.keys import CacheEngineKey

PAGE = 500
"""Objects asked for at a time where the keys are given."""


@dataclass
class _Count:
    objects: int = 0
    num_bytes: int = 0
    kept: int = 0


def clear(
    client: RemoteClient, scope: ClearScope, pinned: Callable[[CacheEngineKey], bool], step_s: float
) -> Cleared:
    """Removes the objects in the scope, page by page; the namespace and the keys of the scope make it cheap,
    for a tenant the header of each object is read.

    Args:
        client: of the store.
        scope: what to remove.
        pinned: what this process keeps, unless the scope says otherwise.
        step_s: for one page.
    """
    count = _Count()
    problems = []
    for place in client.places():
        try:
            for page in _pages(client, place, scope, step_s):
                _clear_page(client, place, page, scope, pinned, step_s, count)
        except RemoteError as error:
            problems.append(error.detail)
    return Cleared(count.objects, count.num_bytes, count.kept, not problems, "; ".join(problems))


def _pages(client: RemoteClient, place: str, scope: ClearScope, step_s: float) -> Iterator[list[Listed]]:
    if scope.keys is None:
        yield from client.pages(place, scope.namespace.hex() if scope.namespace else None, step_s)
        return
    names = [name for name in map(name_of, scope.keys) if client.place_of(name) == place]
    for start in range(0, len(names), PAGE):
        some = names[start : start + PAGE]
        sizes = client.sizes(place, some, time.monotonic() + step_s)
        yield [Listed(name, size) for name, size in zip(some, sizes, strict=True) if size is not None]


def _clear_page(
    client: RemoteClient,
    place: str,
    page: list[Listed],
    scope: ClearScope,
    pinned: Callable[[CacheEngineKey], bool],
    step_s: float,
    count: _Count,
) -> None:
    found = [(listed, key) for listed in page if (key := key_of(listed.name)) is not None]
    tenants: list[bytes | None] = [NO_TENANT if scope.tenant is None else None] * len(found)
    if scope.tenant is not None and found:
        names = [listed.name for listed, _ in found]
        headers = client.headers(place, names, time.monotonic() + step_s)
        tenants = [_tenant(header) for header in headers]
    doomed = []
    for (listed, key), tenant in zip(found, tenants, strict=True):
        # One that names no tenant cannot be served to anybody: it goes too.
        if not scope.covers(key, tenant or scope.tenant or NO_TENANT):
            continue
        if pinned(key) and not scope.pinned_too:
            count.kept += 1
        else:
            doomed.append(listed)
    if doomed:
        names = [listed.name for listed in doomed]
        count.objects += client.remove(place, names, time.monotonic() + step_s)
        count.num_bytes += sum(max(0, listed.num_bytes - HEADER_BYTES) for listed in doomed)


def _tenant(header: bytes | None) -> bytes | None:
    try:
        return None if header is None else decode_header(header).tenant
    except ObjectFormatError:
        return None
