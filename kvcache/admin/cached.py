# SPDX-License-Identifier: Apache-2.0
"""What of a prompt is cached, and what is kept: the answers of all ranks, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BaseModel, Field

from kvcache.admin.prefixes import PromptFields
from kvcache.admin.problems import Problem
from kvcache.control.client import ControlClient, in_words
from kvcache.control.wire import (
    GetPins,
    Locate,
    Located,
    Pin,
    Pinned,
    Pins,
    Prefix,
    Unpin,
    Unpinned,
)
from kvcache.ipc import IpcError, RemoteError, ReplyT

_REFUSED = "PinRefusedError"

Owner = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Missing = Annotated[dict[str, str], Field(description="Ranks that did not answer, and why.")]


class PinRequest(PromptFields):
    owner: Annotated[Owner, Field(description="Who lets go of it later; a name for all that it pins.")]


class RankPin(BaseModel):
    chunks: Annotated[int, Field(description="Whole chunks of the prefix: pinned, stored or not.")]
    stored: Annotated[int, Field(description="Of them, from the first on, in host memory now.")]


class PinReport(BaseModel):
    owner: str
    tokens: Annotated[int, Field(description="Of the prefix, before it was cut to whole chunks.")]
    ranks: Annotated[dict[str, RankPin], Field(description="By the name of the rank, such as rank0.")]
    missing: Missing


class UnpinReport(BaseModel):
    owner: str
    chunks: Annotated[int, Field(description="That the owner had pinned, on the rank with the most.")]
    missing: Missing


class OwnerPins(BaseModel):
    owner: str
    chunks: int


class PinsReport(BaseModel):
    pins: list[OwnerPins]
    missing: Missing


class CachedPart(BaseModel):
    first_token: int
    tokens: int
    tier: Annotated[str, Field(description="The fastest that has this part.")]


class LookupReport(BaseModel):
    tokens: Annotated[int, Field(description="Of the prompt.")]
    cached_tokens: Annotated[
        int, Field(description="From the first on, in some tier of every rank: what a request is given back.")
    ]
    parts: Annotated[list[CachedPart], Field(description="Of the rank that has the least.")]
    ranks: Annotated[dict[str, list[CachedPart]], Field(description="By the name of the rank.")]
    missing: Missing


class CachedPrompts:
    """Asks all ranks.

    Args:
        control: the way to them.
        timeout_s: the longest that one may take: a remote tier may have to be asked.
        changed: what was known of the tiers holds no longer.
    """

    def __init__(self, control: ControlClient, timeout_s: float, changed: Callable[[], None]) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._changed = changed

    async def locate(self, prefix: Prefix) -> LookupReport:
        """Raises Problem: 503 where no rank answers."""
        answers, missing = self._sorted(
            await self._control.ask_ranks(Locate(prefix), Located, self._timeout_s)
        )
        ranks = {name: _parts(located) for name, located in answers.items()}
        least = min(ranks.values(), key=_tokens)
        return LookupReport(
            tokens=len(prefix.tokens),
            cached_tokens=_tokens(least),
            parts=least,
            ranks=ranks,
            missing=missing,
        )

    async def pin(self, owner: str, prefix: Prefix) -> PinReport:
        """On all ranks or on none of those that answer.

        Raises:
            Problem: 409 where a rank refuses; 503 where none answers.
        """
        for check in (True, False):
            pin = Pin(owner=owner, prefix=prefix, check=check)
            found = await self._control.ask_ranks(pin, Pinned, self._timeout_s)
            self._changed()
            for name, answer in found.items():
                if isinstance(answer, RemoteError) and answer.code == _REFUSED:
                    raise Problem(409, "PinRefused", f"{name}: {str(answer).removeprefix(_REFUSED + ': ')}")
        answers, missing = self._sorted(found)
        return PinReport(
            owner=owner,
            tokens=len(prefix.tokens),
            ranks={name: RankPin(chunks=a.chunks, stored=a.stored) for name, a in answers.items()},
            missing=missing,
        )

    async def unpin(self, owner: str) -> UnpinReport:
        """Raises Problem: 503 where no rank answers."""
        found = await self._control.ask_ranks(Unpin(owner=owner), Unpinned, self._timeout_s)
        self._changed()
        answers, missing = self._sorted(found)
        return UnpinReport(
            owner=owner, chunks=max(answer.chunks for answer in answers.values()), missing=missing
        )

    async def pins(self) -> PinsReport:
        """Raises Problem: 503 where no rank answers."""
        answers, missing = self._sorted(await self._control.ask_ranks(GetPins(), Pins, self._timeout_s))
        most: dict[str, int] = {}
        for answer in answers.values():
            for pin in answer.pins:
                most[pin.owner] = max(most.get(pin.owner, 0), pin.chunks)
        pins = [OwnerPins(owner=owner, chunks=chunks) for owner, chunks in sorted(most.items())]
        return PinsReport(pins=pins, missing=missing)

    def _sorted(self, answers: Mapping[str, ReplyT | IpcError]) -> tuple[dict[str, ReplyT], dict[str, str]]:
        """Answers, and in words why there are no others."""
        came = {name: answer for name, answer in answers.items() if not isinstance(answer, IpcError)}
        missing = {
            name: in_words(answer, self._timeout_s)
            for name, answer in answers.items()
            if isinstance(answer, IpcError)
        }
        if not came:
            raise Problem(503, "NoRanks", "No rank answers.", missing=missing)
        return came, missing


def _parts(located: Located) -> list[CachedPart]:
    parts, first = [], 0
    for part in located.parts:
        parts.append(CachedPart(first_token=first, tokens=part.tokens, tier=part.tier))
        first += part.tokens
    return parts


def _tokens(parts: list[CachedPart]) -> int:
    return sum(part.tokens for part in parts)
