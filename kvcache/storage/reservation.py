# SPDX-License-Identifier: Apache-2.0
"""What became of the wish to put a chunk into host memory."""

from __future__ import annotations

import enum
from typing import NamedTuple

from kvcache.memory.objects import MemoryObj
from kvcache.storage.room import Refusal


class Outcome(enum.Enum):
    RESERVED = enum.auto()
    PRESENT = enum.auto()
    """Visible already: nothing to copy."""
    IN_FLIGHT = enum.auto()
    """Somebody is writing it: nothing to copy, but not there yet."""
    FULL = enum.auto()
    """No room, since everything else is under a lease, pinned or being written."""
    DECLINED = enum.auto()
    """Not let in, by the admission policy or the tenant's quota."""


class Reservation(NamedTuple):
    outcome: Outcome
    obj: MemoryObj | None = None
    """Memory to copy into if `RESERVED`, else None."""


PRESENT, IN_FLIGHT = Reservation(Outcome.PRESENT), Reservation(Outcome.IN_FLIGHT)
REFUSED = {
    Refusal.FULL: Reservation(Outcome.FULL),
    Refusal.DECLINED: Reservation(Outcome.DECLINED),
}
