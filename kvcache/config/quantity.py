# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes, written as Kubernetes quantities."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_QUANTITY = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$")
_UNIT_BYTES: dict[str | None, int] = {
    None: 1,
    **{unit + "i": 1024 ** (power + 1) for power, unit in enumerate("KMGTP")},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate("kMGTP")},
}
_LEAST_PLAIN_DIGITS = 9
"""A bare number below this length is taken for a forgotten unit: nobody wants a cache of 32 bytes."""


def parse_quantity(value: object) -> int:
    """Bytes of a Kubernetes quantity such as `32Gi`, `500M` or `34359738368`.

    Raises:
        ValueError: not a quantity, a bare number of fewer than nine digits (a unit was forgotten), or no
            whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is no quantity; write a number with a unit such as 32Gi")
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no quantity; write a number with a unit Ki, Mi, Gi, Ti or k, M, G, T, such as 32Gi"
        )
    if match["unit"] is None and len(text) < _LEAST_PLAIN_DIGITS:
        raise ValueError(f"{text!r} has no unit; write 32Gi for gibibytes or the number of bytes in full")
    size = Decimal(match["number"]) * _UNIT_BYTES[match["unit"]]
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


Quantity = Annotated[int, BeforeValidator(parse_quantity)]
"""A size in bytes, written as a Kubernetes quantity."""
