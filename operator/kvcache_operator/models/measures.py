# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations of a resource: integers that remember how the user wrote them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from kvcache.config import parse_quantity

_CPU = re.compile(r"^([0-9]{1,7})(m?)$")
_DURATION = re.compile(r"^(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?$")


class _Measure(int):
    """An integer with the text that it was read from; the text is what goes back into a resource."""

    text: str

    @classmethod
    def parse(cls, value: object) -> Self:
        raise NotImplementedError

    @classmethod
    def _of(cls, amount: int, text: str) -> Self:
        measure = cls(amount)
        measure.text = text
        return measure

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda measure: measure.text),
        )


class Quantity(_Measure):
    """Bytes, written as a Kubernetes quantity such as `32Gi` (see `kvcache.config.parse_quantity`)."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises ValueError where `value` is no quantity."""
        return value if isinstance(value, cls) else cls._of(parse_quantity(value), str(value).strip())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # A number of fewer than nine digits without a unit is refused: it is a forgotten unit.
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)$|^[0-9]{9,}$",
        }


class Duration(_Measure):
    """Seconds, written as hours, minutes and seconds such as `30m` or `1h30m`."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises ValueError where `value` is no duration."""
        if isinstance(value, cls):
            return value
        match = _DURATION.match(value) if isinstance(value, str) else None
        if match is None or not any(match.groups()):
            raise ValueError(
                f"{value!r} is no duration; write hours, minutes and seconds such as 30m or 1h30m"
            )
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return cls._of(hours * 3600 + minutes * 60 + seconds, str(value))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "type": "string",
            "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$",
            "minLength": 2,
            "maxLength": 16,
        }


class CpuAmount(_Measure):
    """Thousandths of a processor, written as a Kubernetes quantity such as `2` or `500m`."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises ValueError where `value` is no amount of processors."""
        if isinstance(value, cls):
            return value
        match = _CPU.match(str(value)) if isinstance(value, int | str) and value is not True else None
        if match is None:
            raise ValueError(f"{value!r} is no amount of processors; write 2 or 500m")
        return cls._of(int(match[1]) * (1 if match[2] else 1000), str(value))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": "^[0-9]{1,7}m?$",
        }


def at_least(least: _Measure) -> AfterValidator:
    """A lower bound whose sentence shows both amounts as they are written in resources."""

    def check(measure: _Measure) -> _Measure:
        if measure < least:
            raise ValueError(f"{measure.text} is less than {least.text}; write {least.text} or more")
        return measure

    return AfterValidator(check)


def at_most(most: _Measure) -> AfterValidator:
    """An upper bound whose sentence shows both amounts as they are written in resources."""

    def check(measure: _Measure) -> _Measure:
        if measure > most:
            raise ValueError(f"{measure.text} is more than {most.text}; write {most.text} or less")
        return measure

    return AfterValidator(check)


TierCapacity = Annotated[Quantity, at_least(Quantity.parse("256Mi"))]
StartupTimeout = Annotated[Duration, at_least(Duration.parse("1m")), at_most(Duration.parse("6h"))]
DrainTimeout = Annotated[Duration, at_most(Duration.parse("1h"))]
SharedMemory = Annotated[Quantity, at_least(Quantity.parse("64Mi"))]
TierDeadline = Annotated[Duration, at_least(Duration.parse("1s")), at_most(Duration.parse("1m"))]
TimeToLive = Annotated[Duration, at_least(Duration.parse("1s"))]
ScrapeInterval = Annotated[Duration, at_least(Duration.parse("5s")), at_most(Duration.parse("1h"))]
WriteQueue = Annotated[Quantity, at_least(Quantity.parse("1Mi"))]
ClientBuffer = Annotated[Quantity, at_least(Quantity.parse("16Mi"))]
TenantQuota = Annotated[Quantity, at_least(Quantity.parse("1Mi"))]
