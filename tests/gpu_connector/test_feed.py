# SPDX-License-Identifier: Apache-2.0
"""Loads beside the model: what was asked for arrives, slice by slice, and whoever starts one never waits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import _native
from kvcache.gpu_connector import transfer
from kvcache.gpu_connector.feed import LAST_SLICES, SLICES_IN_FLIGHT, Feed, Feeder, cut
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.gpu_connector.transfer import Chunks, PageTransfer, TransferWay, Way
from tests.csrc import coded
from tests.csrc.layouts import LAYOUTS, random_slots, scatter
from tests.gpu_connector.rigs import CHUNK, LAYERS, rig

WAIT_S = 30


def chunks_of(lengths: list[int]) -> Chunks:
    ends = np.cumsum(np.array(lengths, np.int64))
    return Chunks(
        addresses=np.arange(len(lengths), dtype=np.uint64),
        starts=(ends - lengths).astype(np.int64),
        ends=ends.astype(np.int64),
        slots=np.arange(sum(lengths), dtype=np.int64),
    )


@dataclass
class Device:
    """Copies that end when the test says so, in their order."""

    handed_over: list[int] = field(default_factory=list)
    """Numbers of the chunks."""
    copies: list[threading.Event] = field(default_factory=list)
    most_in_flight: int = 0
    fails_at: int = -1
    may_hand_over: threading.Event = field(default_factory=threading.Event)

    def hand_over(self, part: Chunks) -> Completion:
        assert self.may_hand_over.wait(WAIT_S)
        if self.fails_at in part.addresses:
            raise ValueError("a slot outside of the pages")
        self.handed_over += [int(address) for address in part.addresses]
        self.copies.append(threading.Event())
        self.most_in_flight = max(self.most_in_flight, sum(not copy.is_set() for copy in self.copies))
        return _Copy(self.copies[-1])

    def feed(self, chunks: int, settle: Callable[[], Completion] | None = None) -> Feed:
        return Feed(cut(chunks_of([4] * chunks), 1, 1), self.hand_over, settle)


class _Copy(Completion):
    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def done(self) -> bool:
        return self._ended.is_set()


def _until(holds: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(WAIT_S * 1000):
        if holds():
            return
        ended.wait(0.001)
    raise AssertionError("it never came to that")


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 7), st.integers(1, 300))
def test_slices_are_whole_chunks_in_order(lengths: list[int], token_bytes: int, slice_bytes: int) -> None:
    chunks = chunks_of(lengths)
    slices = cut(chunks, token_bytes, slice_bytes)
    assert [int(address) for part in slices for address in part.addresses] == chunks.addresses.tolist()
    spans = [part.slots[a:b] for part in slices for a, b in zip(part.starts, part.ends, strict=True)]
    wanted = [chunks.slots[a:b] for a, b in zip(chunks.starts, chunks.ends, strict=True)]
    assert all(map(np.array_equal, spans, wanted))
    assert len(spans) == len(wanted)
    assert all(len(part.slots) == part.ends[-1] for part in slices), "slots of other slices"
    sizes = [[int(n) * token_bytes for n in part.ends - part.starts] for part in slices]
    assert all(sum(size) >= slice_bytes for size in sizes[:-1])
    assert all(sum(size[:-1]) < slice_bytes for size in sizes)
    assert all(sizes)


def test_starting_a_load_does_not_wait_and_few_slices_are_under_way() -> None:
    begun: list[int] = []
    device, feeder = Device(), Feeder(lambda: begun.append(threading.get_ident()))
    last = LAST_SLICES + SLICES_IN_FLIGHT
    first, second = device.feed(last + 3), device.feed(4)
    feeder.start(first)
    feeder.start(second)
    # Both calls have come back, and not one slice could be handed over yet.
    assert (device.handed_over, first.done()) == ([], False)
    device.may_hand_over.set()
    for ended in range(last + 7):
        # The first load's last slices do not wait until few are under way.
        most = SLICES_IN_FLIGHT if ended < 3 else last
        _until(lambda most=most, ended=ended: len(device.copies) == min(last + 7, ended + most))  # type: ignore[misc]
        assert (first.queued(), first.done(), second.done()) == (ended >= 3, ended >= last + 3, False)
        device.copies[ended].set()
    assert second.wait(WAIT_S)
    assert first.done()
    assert device.handed_over == [*range(last + 3), *range(4)]
    assert device.most_in_flight == last
    assert len(begun) == 1
    assert begun[0] != threading.get_ident()
    assert (first.error, first.moved(last + 3), second.moved(4)) == (None, last + 3, 4)
    feeder.close()


def test_a_load_of_which_a_slice_fails_ends_when_nothing_of_it_runs_any_more() -> None:
    last = threading.Event()
    device, feeder = Device(fails_at=3), Feeder()
    device.may_hand_over.set()
    failing, next_one = device.feed(6, lambda: _Copy(last)), device.feed(1)
    feeder.start(failing)
    feeder.start(next_one)
    _until(lambda: len(device.copies) == 4)
    assert device.handed_over == [0, 1, 2, 0], "what lies behind the gap is not wanted, other loads are"
    for copy in device.copies:
        copy.set()
    assert next_one.wait(WAIT_S)
    assert not failing.done(), "the call that failed may have queued copies"
    last.set()
    assert failing.wait(WAIT_S)
    assert isinstance(failing.error, ValueError)
    assert (failing.moved(6), next_one.error) == (3, None)
    feeder.close()


def test_closing_ends_what_is_not_handed_over() -> None:
    device, feeder = Device(), Feeder()
    device.may_hand_over.set()
    slices = LAST_SLICES + SLICES_IN_FLIGHT + 1
    running, waiting, late = device.feed(slices), device.feed(3), device.feed(2)
    feeder.start(running)
    feeder.start(waiting)
    _until(lambda: len(device.copies) == SLICES_IN_FLIGHT)
    closing = threading.Thread(target=feeder.close)
    closing.start()
    for copy in device.copies:
        copy.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    feeder.start(late)
    assert all(feed.wait(WAIT_S) for feed in (running, waiting, late))
    assert all(feed.error is not None for feed in (running, waiting, late))
    assert (waiting.moved(3), late.moved(2)) == (0, 0)
    assert running.moved(slices) == len(device.handed_over)
    feeder.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_hold_what_was_loaded(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "cut", partial(cut, slice_bytes=random.randrange(1, 9000)))
    one = rig(layout, VLLMPagedMemGPUConnectorV2)
    lengths = [CHUNK, CHUNK, random.randint(1, CHUNK)]
    objs, ends = one.objects(*lengths), np.cumsum(lengths).tolist()
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    slots = random_slots(one.kv.slots, ends[-1], 8, skip=0.1)
    expected = one.kv.snapshot()
    for obj, start, end in zip(objs, starts, ends, strict=True):
        expected = [scatter(expected[i], slots[start:end], one.rows(obj, i)) for i in range(LAYERS)]
    feed = one.connector.feed_to_gpu(objs, starts, ends, slot_mapping=slots)
    assert feed.wait(WAIT_S)
    assert (feed.error, feed.moved(3)) == (None, 3)
    assert all(map(torch.equal, one.kv.snapshot(), expected))
    one.connector.close()
    one.close()


def test_a_slot_outside_of_the_pages_is_the_feeds_error() -> None:
    one = rig("LBHNC", VLLMPagedMemGPUConnectorV2)
    (obj,) = one.objects(CHUNK)
    feed = one.connector.feed_to_gpu([obj], [0], [CHUNK], slot_mapping=torch.arange(CHUNK) + 80 - 3)
    assert feed.wait(WAIT_S)
    assert isinstance(feed.error, ValueError)
    assert feed.moved(1) == 0
    with pytest.raises(ValueError, match="objects"):
        one.connector.feed_to_gpu([obj], [0], [], slot_mapping=torch.arange(CHUNK))
    one.connector.close()
    one.close()


class _Coded:
    """Pages of coded rows that the copy engine loads, and four chunks of them, stored; a slice a chunk.

    Args:
        skip: share of the tokens without a slot.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, skip: float = 0.0) -> None:
        monkeypatch.setattr(transfer, "cut", partial(cut, slice_bytes=1))
        self.kv = coded.kv(
            "LBNHC", layers=2, blocks=12, block_size=8, heads=3, head_size=64, seed=random.randrange(99)
        )
        self.transfer, self.before = PageTransfer(coded.pages_of(self.kv)), self.kv.snapshot()
        self.transfer.quiet_load_way = TransferWay(Way.STRIDED_DMA)
        self.ends = np.cumsum([20, 20, 20, 13]).astype(np.int64)
        starts = np.concatenate([[0], self.ends[:-1]])
        self.slots = random_slots(self.kv.slots, int(self.ends[-1]), 8, skip=skip).numpy()
        token_bytes = 2 * self.transfer.pages.chunk_token_bytes
        self.memory = np.zeros(int(self.ends[-1]) * token_bytes, dtype=np.uint8)
        self.addresses = (self.memory.ctypes.data + starts * token_bytes).astype(np.uint64)
        self.starts = starts
        assert self.transfer.store(self.chunks(self.slots)).moved(4) == 4
        self.kv.storage.fill_(0xA5)

    def chunks(self, slots: np.ndarray) -> Chunks:
        return Chunks(self.addresses, self.starts, self.ends, slots)

    def load(self, slots: np.ndarray) -> Feed:
        feed = self.transfer.feed(self.chunks(slots))
        assert feed.wait(WAIT_S)
        return feed

    def check(self, slots: np.ndarray) -> None:
        """These slots hold what was stored."""
        mine = torch.from_numpy(slots[slots >= 0])
        for rows, was in zip(self.kv.snapshot(), self.before, strict=True):
            assert torch.equal(rows[mine], was[mine])


@pytest.mark.parametrize("expanded_bytes", [1, 40_000, 1 << 30])
def test_coded_rows_that_the_copy_engine_brought_expand_also_behind_an_error(
    expanded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_EXPANDED_BYTES", expanded_bytes)
    one = _Coded(monkeypatch, skip=0.1)
    feed = one.load(one.slots)
    assert (feed.moved(4), feed.error) == (4, None)
    one.check(one.slots)

    one.kv.storage.fill_(0xA5)
    broken = one.slots.copy()
    broken[-1] = one.kv.slots
    feed = one.load(broken)
    assert feed.moved(4) == 3
    assert isinstance(feed.error, ValueError)
    one.check(one.slots[: one.ends[2]])

    twice = one.slots.copy()
    twice[-1] = next(slot for slot in one.slots if slot >= 0)
    feed = one.load(twice)
    if expanded_bytes == 1 << 30:  # one token of two slices that expand together
        assert feed.moved(4) == 0
        assert isinstance(feed.error, ValueError)
    else:  # the later slice's row has it
        one.check(np.setdiff1d(one.slots, [-1, one.slots[-1], twice[-1]]))
    one.transfer.close()


def test_of_an_expansion_that_failed_nothing_counts_and_nothing_is_expanded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, expand, calls = _Coded(monkeypatch), _native.expand_in_place, [0]

    def fail_behind_the_launch(*arguments: Any, **options: Any) -> None:
        expand(*arguments, **options)
        calls[0] += 1
        raise RuntimeError("the device says no")

    monkeypatch.setattr(_native, "expand_in_place", fail_behind_the_launch)
    feed = one.load(one.slots)
    assert (feed.moved(4), calls[0], str(feed.error)) == (0, 1, "the device says no")
    one.transfer.close()


def test_rows_that_come_another_way_do_not_come_between_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _Coded(monkeypatch)
    ways = iter((Way.STRIDED_DMA, Way.STAGED, Way.STRIDED_DMA, Way.STRIDED_DMA))
    monkeypatch.setattr(PageTransfer, "_possible", lambda self, way, chunks: TransferWay(next(ways), 1))
    twice = one.slots.copy()
    twice[25] = twice[10]
    feed = one.load(twice)
    assert (feed.moved(4), feed.error) == (4, None)
    one.check(np.delete(one.slots, [10, 25]))
    one.transfer.close()
