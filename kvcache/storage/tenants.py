# SPDX-License-Identifier: Apache-2.0
"""Tenants: the requests of one `cache_salt`, and how many bytes their chunks may occupy in each tier."""

from __future__ import annotations

from collections.abc import Mapping

from kvcache.config.tiers import TenantConfig
from kvcache.storage.tier import NO_TENANT
from kvcache.tokens.hashing import digest128

EVERY_OTHER = "*"
"""In the configuration: each salt that is not named."""


def tenant_of(salt: str) -> bytes:
    """16 bytes that stand for the requests of a `cache_salt`; `NO_TENANT` for those without one."""
    return digest128(b"tenant", salt.encode()) if salt else NO_TENANT


class Quotas:
    """How many bytes each tenant may occupy. Thread-safe: the table is replaced as a whole."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self.replace(tenants)

    def replace(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Takes the quotas of a new configuration."""
        others = tenants.get(EVERY_OTHER)
        named = {tenant_of(salt): one.quota for salt, one in tenants.items() if salt != EVERY_OTHER}
        self._table = (named, None if others is None else others.quota)

    def of(self, tenant: bytes) -> int | None:
        """Bytes in each tier of a rank; None without a limit. Requests without a salt are under the quota of
        the salt "" alone, if there is one."""
        named, others = self._table
        return named.get(tenant, None if tenant == NO_TENANT else others)
