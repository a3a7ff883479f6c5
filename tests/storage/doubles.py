# SPDX-License-Identifier: Apache-2.0
"""A tier in memory that answers when it is told to, at the worst time that the interface allows: bytes are
read from and written to host memory when the answer comes, and a failed read leaves garbage there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvcache.stats import TierStats
from kvcache.storage.tier import (
    NO_TENANT,
    Cleared,
    ClearScope,
    Health,
    PutOutcome,
    StoredObject,
    Tier,
    WantedObject,
)
from kvcache.tokens.keys import CacheEngineKey


@dataclass
class Held:
    payload: bytes
    num_tokens: int
    tenant: bytes = NO_TENANT
    parent: bytes = b""


@dataclass(eq=False)
class Call:
    """A call that is not answered yet."""

    kind: str
    future: Future[Any]
    answer: Callable[[bool], Any]
    """What it does and answers, well or not."""
    size: int


@dataclass(eq=False)
class DoubleTier(Tier):
    """Args:
    name: of the tier.
    indexed: heads are answered at once.
    prompt: all calls are answered at once, and well.
    """

    name: str = "disk"
    indexed: bool = True
    prompt: bool = False
    objects: dict[CacheEngineKey, Held] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    state: Health = field(default=Health("Ready"))
    declines: Callable[[StoredObject], bool] = lambda stored: False
    asked: list[list[CacheEngineKey]] = field(default_factory=list)
    """Keys of each `head`."""
    closed: bool = False

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        self.asked.append(list(keys))

        def answer(well: bool) -> list[int | None]:
            found = [self.objects.get(key) for key in keys]
            return [len(one.payload) if one is not None and well else None for one in found]

        return self._call("head", answer, len(keys), at_once=self.indexed)

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        return self._call("get", lambda well: [self._read(one, well) for one in wanted], len(wanted))

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        return self._call("put", lambda well: [self._write(one, well) for one in objects], len(objects))

    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        return self._call(
            "remove", lambda well: sum(self.objects.pop(key, None) is not None for key in keys), len(keys)
        )

    def clear(self, scope: ClearScope) -> Future[Cleared]:
        def answer(well: bool) -> Cleared:
            if not well:
                return Cleared(0, 0, 0, complete=False, detail="not reached")
            gone = [key for key, held in self.objects.items() if scope.covers(key, held.tenant)]
            return Cleared(len(gone), sum(len(self.objects.pop(key).payload) for key in gone), 0)

        return self._call("clear", answer, 1)

    def health(self) -> Health:
        return self.state

    def stats(self) -> TierStats:
        used = sum(len(held.payload) for held in self.objects.values())
        numbers: dict[str, Any] = dict.fromkeys(TierStats.__struct_fields__[2:13], 0)
        numbers |= {"used_bytes": used, "objects": len(self.objects)}
        return TierStats(name=self.name, state=self.state.state, **numbers)

    def close(self) -> None:
        self.closed = True
        while self.calls:
            self.answer(well=False)

    def answer(self, kind: str | None = None, *, well: bool = True) -> Call | None:
        """Answers the oldest call, of this kind if one is named; None if there is none."""
        call = next((call for call in self.calls if kind in (None, call.kind)), None)
        if call is not None:
            self.answer_call(call, well=well)
        return call

    def answer_call(self, call: Call, *, well: bool = True) -> None:
        self.calls.remove(call)
        call.future.set_result(call.answer(well))

    def answer_all(self, kind: str | None = None) -> None:
        while self.answer(kind) is not None:
            pass

    def fail(self, error: Exception) -> None:
        """The oldest call ends with an error, which the interface does not allow."""
        self.calls.pop(0).future.set_exception(error)

    def _call(
        self, kind: str, answer: Callable[[bool], Any], size: int, at_once: bool = False
    ) -> Future[Any]:
        future: Future[Any] = Future()
        if at_once or self.prompt:
            future.set_result(answer(True))
        else:
            self.calls.append(Call(kind, future, answer, size))
        return future

    def _read(self, wanted: WantedObject, well: bool) -> bool:
        held = self.objects.get(wanted.key)
        if held is None or not well:
            wanted.target[:] = os.urandom(len(wanted.target))
            return False
        wanted.target[:] = held.payload
        return True

    def _write(self, stored: StoredObject, well: bool) -> PutOutcome:
        if not well:
            return PutOutcome.FAILED
        if stored.key in self.objects:
            return PutOutcome.PRESENT
        if self.declines(stored):
            return PutOutcome.DECLINED
        self.objects[stored.key] = Held(
            bytes(stored.payload), stored.num_tokens, stored.tenant, stored.parent
        )
        return PutOutcome.STORED
