# SPDX-License-Identifier: Apache-2.0
"""Admission on the second use."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.storage.policies.base import AdmissionPolicy, K

_REMEMBERED = 10
"""Keys for each one that there is room for."""


class SecondUseAdmission(AdmissionPolicy[K]):
    """Lets in what was used before, not long ago: what is used once, as most objects are, is not written."""

    def __init__(self, capacity: int) -> None:
        self._limit = _REMEMBERED * max(1, capacity)
        self._used_again: OrderedDict[K, bool] = OrderedDict()
        """The keys that were used last."""

    def seen(self, key: K) -> None:
        self._used_again[key] = key in self._used_again
        self._used_again.move_to_end(key)
        if len(self._used_again) > self._limit:
            self._used_again.popitem(last=False)

    def admits(self, key: K, victim: K | None) -> bool:
        return self._used_again.get(key, False)
