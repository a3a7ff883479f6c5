# SPDX-License-Identifier: Apache-2.0
"""Lookups over real sockets: what the ranks hold, what becomes of leases, and ranks that hang or die."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvcache.ipc import IpcError
from kvcache.lookup.client import NEVER_ASKED, Backoff, LookupClient, LookupResult
from kvcache.lookup.server import LookupServer
from kvcache.lookup.wire import MAX_ID_CHARS, LookupReply, LookupRequest, socket_path

DIGEST = 16


def digests(count: int) -> bytes:
    return os.urandom(DIGEST * count)


class Rank:
    """A rank that stores digests in a set; it can be told to hang."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.leases: dict[str, int] = {}
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def store(self, hashes: bytes, count: int) -> None:
        self.stored = {hashes[i * DIGEST : (i + 1) * DIGEST] for i in range(count)}

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        self.go.wait(30)
        if self.error is not None:
            raise self.error
        hashes, found = request.hashes, 0
        while found * DIGEST < len(hashes) and hashes[found * DIGEST : (found + 1) * DIGEST] in self.stored:
            found += 1
        if found:
            self.leases[owner] = found
        return LookupReply(found, found, found)

    def progress(self, owner: str) -> LookupReply:
        found = self.leases.get(owner, 0)
        return LookupReply(found, found, found)

    def release(self, owner: str) -> None:
        self.leases.pop(owner, None)

    def release_session(self, prefix: str) -> None:
        self.leases = {owner: n for owner, n in self.leases.items() if not owner.startswith(prefix)}


@contextlib.contextmanager
def serving(folder: Path, ranks: Sequence[Rank]) -> Iterator[list[LookupServer]]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(LookupServer(folder, number, rank)) for number, rank in enumerate(ranks)
        ]
        yield servers
        for rank in ranks:
            rank.go.set()


def eventually(check: object, seconds: float = 10.0) -> None:
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def settle(client: LookupClient, servers: Sequence[LookupServer]) -> None:
    """Waits until the servers have handled everything that the client has sent."""
    assert client.hello(10) == []
    assert all(server.counters.failures == 0 for server in servers)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_answer_is_the_least_of_all_ranks(socket_dir: Path, world_size: int) -> None:
    ranks = [Rank() for _ in range(world_size)]
    with serving(socket_dir, ranks), LookupClient(socket_dir, world_size, timeout_s=10) as client:
        for number in range(20):
            total = random.randint(1, 700)
            hashes = digests(total)
            held = [random.randint(0, total) for _ in ranks]
            for rank, count in zip(ranks, held, strict=True):
                rank.store(hashes, count)
            assert client.lookup(f"r{number}", hashes) == LookupResult(min(held), False, min(held))
            assert client.lookup_cache(f"r{number}") == min(held)
        assert client.counters.lookups == 20
        assert client.counters.seconds > 0
        assert client.counters.timeouts == client.counters.failures == client.counters.skipped == 0


def test_answers_are_kept_until_cleared(socket_dir: Path) -> None:
    rank = Rank()
    hashes = digests(5)
    rank.store(hashes, 5)
    with serving(socket_dir, [rank]) as servers, LookupClient(socket_dir, 1, timeout_s=10) as client:
        assert client.lookup_cache("a") == NEVER_ASKED == -1
        client.lookup("a", hashes)
        client.lookup("b", hashes)
        client.clear("a")
        assert (client.lookup_cache("a"), client.lookup_cache("b")) == (-1, 5)
        client.cancel("b")
        assert client.lookup_cache("b") == -1
        settle(client, servers)
        assert rank.leases == {client.owner("a"): 5}, "clear leaves the lease to the worker, cancel ends it"
        client.cancel("never asked")
        settle(client, servers)


def test_nothing_to_look_up(socket_dir: Path) -> None:
    with LookupClient(socket_dir, 2, timeout_s=10) as client:
        assert client.lookup("a", b"") == LookupResult(0, False)
        with pytest.raises(ValueError, match="17 bytes of hashes"):
            client.lookup("a", bytes(17))


def test_leases_of_a_rank_that_holds_more_than_another_end_when_nothing_is_loaded(socket_dir: Path) -> None:
    ranks = [Rank(), Rank()]
    hashes = digests(4)
    ranks[0].store(hashes, 3)
    with serving(socket_dir, ranks) as servers, LookupClient(socket_dir, 2, timeout_s=10) as client:
        assert client.lookup("a", hashes).chunks == 0
        settle(client, servers)
        assert ranks[0].leases == {}


def test_a_rank_that_hangs_costs_the_deadline_once_and_keeps_no_lease(socket_dir: Path) -> None:
    ranks = [Rank(), Rank()]
    hashes = digests(6)
    for rank in ranks:
        rank.store(hashes, 6)
    with serving(socket_dir, ranks) as servers, LookupClient(socket_dir, 2, timeout_s=0.2) as client:
        assert client.hello(10) == []
        ranks[1].go.clear()
        assert client.lookup("first", hashes) == LookupResult(0, True)
        assert client.counters.seconds >= 0.2
        for number in range(50):
            assert client.lookup(f"later {number}", hashes) == LookupResult(0, True)
        assert (client.counters.timeouts, client.counters.skipped) == (1, 50), "one waited, 50 did not"
        assert client.lookup_cache("first") == 0
        eventually(lambda: ranks[0].leases == {})

        ranks[1].go.set()
        eventually(lambda: client.lookup("again", hashes) == LookupResult(6, False, 6))
        settle(client, servers)
        assert [set(rank.leases) for rank in ranks] == [{client.owner("again")}] * 2, "no late lease stayed"


def test_a_cancel_during_the_hang_reaches_the_rank_afterwards(socket_dir: Path) -> None:
    rank = Rank()
    hashes = digests(6)
    rank.store(hashes, 6)
    with serving(socket_dir, [rank]) as servers, LookupClient(socket_dir, 1, timeout_s=0.1) as client:
        assert client.lookup("early", hashes).chunks == 6
        rank.go.clear()
        client.lookup("late", hashes)
        client.cancel("early")
        rank.go.set()
        settle(client, servers)
        assert rank.leases == {}


def test_a_rank_that_is_not_there_costs_no_time(socket_dir: Path) -> None:
    hashes = digests(3)
    rank = Rank()
    rank.store(hashes, 3)
    with LookupClient(socket_dir, 1, timeout_s=3600) as client:
        for number in range(3):
            assert client.lookup(f"r{number}", hashes) == LookupResult(0, True)
        assert client.hello(0.01) == [0]
        with serving(socket_dir, [rank]):
            eventually(lambda: client.lookup("r", hashes) == LookupResult(3, False, 3))


def test_the_ranks_restart(socket_dir: Path) -> None:
    hashes = digests(7)
    with LookupClient(socket_dir, 2, timeout_s=0.3) as client:
        for life in range(3):
            ranks = [Rank(), Rank()]
            for rank in ranks:
                rank.store(hashes, 7 - life)
            with serving(socket_dir, ranks) as servers:
                eventually(lambda: client.lookup("r", hashes) == LookupResult(7 - life, False, 7 - life))  # noqa: B023
                settle(client, servers)
            assert client.lookup("gone", hashes) == LookupResult(0, True)


def test_the_scheduler_restarts_and_its_old_leases_end(socket_dir: Path) -> None:
    rank = Rank()
    hashes = digests(2)
    rank.store(hashes, 2)
    with serving(socket_dir, [rank]) as servers:
        with LookupClient(socket_dir, 1, timeout_s=10) as old:
            old.lookup("a", hashes)
            old.lookup("b", hashes)
            with LookupClient(socket_dir, 1, timeout_s=10) as new:
                assert new.session != old.session
                assert new.lookup("a", hashes).chunks == 2
                assert set(rank.leases) == {new.owner("a")}
                # What the old one still sends takes no lease and ends none of the new one's.
                assert old.lookup("c", hashes) == LookupResult(0, False)
                old.cancel("a")
                assert new.lookup("d", hashes).chunks == 2
                assert set(rank.leases) == {new.owner("a"), new.owner("d")}
                assert old.counters.failures == 1
        assert servers[0].counters.failures == 1


def test_hello_opens_the_session(socket_dir: Path) -> None:
    rank = Rank()
    hashes = digests(2)
    rank.store(hashes, 2)
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, timeout_s=10) as old:
        old.lookup("a", hashes)
        with LookupClient(socket_dir, 1, timeout_s=10) as new:
            assert new.hello(10) == []
            assert rank.leases == {}


def test_an_engine_that_fails_is_a_miss_and_no_reason_to_stay_away(socket_dir: Path) -> None:
    ranks = [Rank(), Rank()]
    hashes = digests(3)
    for rank in ranks:
        rank.store(hashes, 3)
    with serving(socket_dir, ranks), LookupClient(socket_dir, 2, timeout_s=10) as client:
        ranks[1].error = RuntimeError("index is broken")
        assert client.lookup("a", hashes) == LookupResult(0, False)
        assert client.counters.failures == 1
        ranks[1].error = None
        assert client.lookup("b", hashes) == LookupResult(3, False, 3)
        assert set(ranks[0].leases) == {client.owner("b")}


def test_an_engine_that_claims_too_much_is_not_believed(socket_dir: Path) -> None:
    class Boaster(Rank):
        def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
            self.leases[owner] = 99
            count = len(request.hashes) // DIGEST + 1
            return LookupReply(count, count, count)

    rank = Boaster()
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, timeout_s=10) as client:
        assert client.lookup("a", digests(3)) == LookupResult(0, False)
        assert client.counters.failures == 1
        assert rank.leases == {}


@pytest.mark.parametrize("lookup_id", ["", "x" * (MAX_ID_CHARS + 1)])
def test_an_id_that_no_rank_accepts_is_a_miss(socket_dir: Path, lookup_id: str) -> None:
    rank = Rank()
    hashes = digests(1)
    rank.store(hashes, 1)
    with serving(socket_dir, [rank]) as servers, LookupClient(socket_dir, 1, timeout_s=10) as client:
        assert client.lookup(lookup_id, hashes) == LookupResult(0, False)
        client.cancel(lookup_id)
        assert client.lookup("x" * MAX_ID_CHARS, hashes) == LookupResult(1, False, 1)
        settle(client, servers)
        assert servers[0].counters.malformed == 0


def test_releases_wait_for_a_rank_that_is_away_and_come_before_the_next_lookup(socket_dir: Path) -> None:
    hashes = digests(1)
    rank = Rank()
    rank.store(hashes, 1)
    longest = "x" * (MAX_ID_CHARS - 6)
    with LookupClient(socket_dir, 1, timeout_s=10, session="s1") as client:
        ids = [f"{longest}{number:06}" for number in range(1500)]  # more than one message may carry
        rank.leases = {client.owner(lookup_id): 1 for lookup_id in ids}
        for lookup_id in ids:
            client.cancel(lookup_id)
        with serving(socket_dir, [rank]) as servers:
            eventually(lambda: client.lookup(ids[0], hashes) == LookupResult(1, False, 1))
            settle(client, servers)
            assert set(rank.leases) == {client.owner(ids[0])}


def test_garbage_does_not_stop_lookups(socket_dir: Path) -> None:
    rank = Rank()
    hashes = digests(3)
    rank.store(hashes, 3)
    with serving(socket_dir, [rank]) as servers, LookupClient(socket_dir, 1, timeout_s=10) as client:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(f"ipc://{socket_path(socket_dir, 0)}")
        for _ in range(20):
            raw.send_multipart([bytes(8), os.urandom(random.randint(0, 50))])
            raw.send_multipart([os.urandom(random.randint(0, 30))])
        eventually(lambda: servers[0].counters.malformed == 40)
        assert client.lookup("a", hashes) == LookupResult(3, False, 3)
        context.destroy(linger=0)


def test_a_folder_whose_sockets_have_no_room(socket_dir: Path) -> None:
    with pytest.raises(IpcError, match="at most 107 bytes"):
        LookupClient(socket_dir / ("x" * 100), 1)


@given(st.lists(st.tuples(st.sampled_from(["miss", "probe", "answer"]), st.floats(0.001, 3)), max_size=60))
def test_backoff(events: list[tuple[str, float]]) -> None:
    """Not asked before a probe came back; asked at the latest after the longest pause."""
    backoff = Backoff(first_s=0.1, longest_s=5)
    now = 0.0
    misses_in_a_row = 0
    for event, passed in events:
        now += passed
        if event == "miss":
            backoff.missed(now)
            misses_in_a_row += 1
            assert not backoff.may_ask(now + 3600)
            assert backoff.pause_s == min(5, 0.1 * 2 ** (misses_in_a_row - 1))
        elif event == "probe":
            backoff.probe_answered()
            assert backoff.may_ask(now + 5)
        elif backoff.may_ask(now):
            backoff.answered()
            misses_in_a_row = 0
            assert backoff.may_ask(now)


# Lookups that wait for slower tiers


class SlowRank(Rank):
    """A rank that has some chunks at once and others later."""

    def __init__(self, chunks: int, most: int, wait_s: float = 0.0) -> None:
        super().__init__()
        self.reply = LookupReply(chunks, most, chunks, wait_s, [("cpu", chunks)])
        self.asked: list[LookupRequest] = []
        self.progressed = 0

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        self.asked.append(request)
        self.leases[owner] = self.reply.chunks
        return self.reply

    def progress(self, owner: str) -> LookupReply:
        self.go.wait(30)
        self.progressed += 1
        return self.reply if owner in self.leases else LookupReply(0, 0, 0)


def wait_for(client: LookupClient, lookup_id: str, result: LookupResult) -> None:
    eventually(lambda: client.progress(lookup_id) == result)


def test_what_may_come_is_the_least_of_all_ranks_too(socket_dir: Path) -> None:
    ranks = [SlowRank(2, 5, 1.5), SlowRank(1, 4, 0.5)]
    with serving(socket_dir, ranks) as servers, LookupClient(socket_dir, 2, timeout_s=10) as client:
        tenant = os.urandom(16)
        found = client.lookup("a", digests(6), num_tokens=90, skip=1, tenant=tenant, seconds_per_token=0.5)
        assert found == LookupResult(1, False, 1, 3, 1.5, (("cpu", 2),))
        request = ranks[1].asked[0]
        assert (request.num_tokens, request.skip, request.tenant) == (90, 1, tenant)
        assert request.seconds_per_token == 0.5
        ranks[0].reply = LookupReply(5, 5, 5)
        wait_for(client, "a", LookupResult(1, False, 1, 3, 0.5, ()))
        # The second rank has no more: nobody waits for what one rank alone has.
        ranks[1].reply = LookupReply(2, 2, 2)
        wait_for(client, "a", LookupResult(2, False, 2))
        assert client.settle("a") == client.lookup_cache("a") == 2
        settle(client, servers)
        assert all(rank.leases for rank in ranks)


def test_one_question_a_millisecond_for_all_that_wait(socket_dir: Path) -> None:
    rank = SlowRank(0, 3, 1.0)
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, timeout_s=10) as client:
        names = [f"r{number}" for number in range(50)]
        for name in names:
            client.lookup(name, digests(3))
        started = time.monotonic()
        turns = 0
        while time.monotonic() < started + 0.05:
            assert all(client.progress(name).coming == 3 for name in names)
            turns += 1
        took = (time.monotonic() - started) * 1000
        assert 0 < rank.progressed <= 50 * (took + 1)
        assert turns > 0


def test_a_lookup_that_ends_with_nothing_keeps_no_lease(socket_dir: Path) -> None:
    ranks = [SlowRank(2, 4), SlowRank(0, 4)]
    with serving(socket_dir, ranks) as servers, LookupClient(socket_dir, 2, timeout_s=10) as client:
        assert client.lookup("a", digests(4)).coming == 4
        assert client.lookup("b", digests(4)).coming == 4
        assert client.settle("a") == 0
        client.cancel("b")
        settle(client, servers)
        assert [rank.leases for rank in ranks] == [{}, {}]
        assert client.progress("a") == LookupResult(0, False)


def test_a_rank_that_hangs_while_others_wait_costs_one_deadline(socket_dir: Path) -> None:
    ranks = [SlowRank(1, 4), SlowRank(1, 4)]
    with serving(socket_dir, ranks) as servers, LookupClient(socket_dir, 2, timeout_s=0.2) as client:
        for name in "abc":
            assert client.lookup(name, digests(4)).coming == 3
        ranks[1].go.clear()
        eventually(lambda: client.progress("a") == LookupResult(0, True))
        before = client.counters.seconds
        assert client.progress("b") == client.progress("c") == LookupResult(0, True)
        assert client.counters.seconds - before < 0.2
        assert [client.settle(name) for name in "abc"] == [0, 0, 0]
        ranks[1].go.set()
        eventually(lambda: client.lookup("d", digests(4)).coming == 3)
        settle(client, servers)
        assert [set(rank.leases) for rank in ranks] == [{client.owner("d")}] * 2


def test_a_rank_that_was_restarted_knows_of_no_lookup(socket_dir: Path) -> None:
    rank = SlowRank(1, 4)
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, timeout_s=10) as client:
        client.lookup("a", digests(4))
        rank.leases.clear()
        wait_for(client, "a", LookupResult(0, False))
        assert client.settle("a") == 0


def test_more_lookups_than_one_question_holds(socket_dir: Path) -> None:
    rank = SlowRank(1, 4)
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, timeout_s=10) as client:
        names = [f"r{number}" for number in range(600)]
        for name in names:
            client.lookup(name, digests(4))
        rank.reply = LookupReply(4, 4, 4)
        eventually(lambda: all(client.progress(name) == LookupResult(4, False, 4) for name in names))


# Ranks in the scheduler's process


class OwnRank(Rank):
    """A rank that knows who called it."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: set[int] = set()

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        self.callers.add(threading.get_ident())
        return super().lookup(request, owner)


def test_a_rank_in_this_process_is_called(socket_dir: Path) -> None:
    rank, hashes = OwnRank(), digests(9)
    rank.store(hashes, 7)
    with serving(socket_dir, [rank]) as servers, LookupClient(socket_dir, 1, call_own=True) as client:
        assert client.hello(1) == []
        assert client.lookup("r", hashes) == LookupResult(7, False, 7)
        assert rank.callers == {threading.get_ident()}
        assert rank.leases == {client.owner("r"): 7}
        client.cancel("r")
        assert rank.leases == {}, "at once: nothing is on its way"
        rank.error = OSError("no disk")
        assert client.lookup("r", hashes) == LookupResult(0, False)
        assert (client.counters.failures, client.counters.timeouts) == (1, 0)
        rank.error = None
        servers[0].close()
        assert client.lookup("r", hashes).timed_out
        # Another server at the same place.
        with LookupServer(socket_dir, 0, rank):
            eventually(lambda: client.lookup("r", hashes).chunks == 7)


def test_a_rank_of_another_process_is_asked_over_its_socket(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a fork: the server is known here, and its thread is not here."""
    rank, hashes = OwnRank(), digests(3)
    rank.store(hashes, 3)
    with serving(socket_dir, [rank]):
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        with LookupClient(socket_dir, 1, timeout_s=10, call_own=True) as client:
            assert client.lookup("r", hashes).chunks == 3
        assert rank.callers
        assert threading.get_ident() not in rank.callers
        monkeypatch.undo()


def test_a_waiting_lookup_of_a_rank_in_this_process(socket_dir: Path) -> None:
    rank = SlowRank(0, 5, 1.0)
    with serving(socket_dir, [rank]), LookupClient(socket_dir, 1, call_own=True) as client:
        assert client.lookup("r", digests(5)).coming == 5
        rank.reply = LookupReply(5, 5, 5)
        wait_for(client, "r", LookupResult(5, False, 5))
        assert client.settle("r") == 5
