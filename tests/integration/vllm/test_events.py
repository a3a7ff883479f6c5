# SPDX-License-Identifier: Apache-2.0
"""KV events: what a subscriber of vLLM's own publisher believes is what the ranks' tiers hold."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcache.integration.vllm.events import KVEvents
from kvcache.storage.changes import Change, ChangeLog, Changes
from kvcache.tokens.database import chain_root, chain_secret
from kvcache.tokens.hashing import PrefixChain
from kvcache.tokens.keys import CacheEngineKey
from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import BLOCK, CHUNK, Engine, Reference, Tokens
from tests.integration.vllm.servers import eventually

# A real vLLM and a subscriber of it


class Subscriber:
    """What a router makes of the events: blocks by medium, from the first event on."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.blocks: defaultdict[str, dict[Any, BlockStored]] = defaultdict(dict)
        self.stored: list[BlockStored] = []
        self.removed: list[BlockRemoved] = []
        self._sequence = -1

    def wait_until_connected(self, engine: Engine, prompt: Tokens) -> None:
        """Whoever subscribes late misses what was published before: asks until something arrives."""
        for _ in range(50):
            engine.answer(prompt)
            engine.forget_gpu()
            if self._socket.poll(100):
                return
        raise AssertionError("nothing was published")

    def read(self) -> None:
        """All that was published."""
        while self._socket.poll(300):
            _, sequence, payload = self._socket.recv_multipart()
            assert self._sequence in (-1, int.from_bytes(sequence, "big") - 1)
            self._sequence = int.from_bytes(sequence, "big")
            for event in self._decoder.decode(payload).events:
                self._take(event)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _take(self, event: Any) -> None:
        if isinstance(event, BlockStored) and event.medium == "CPU":
            self.stored.append(event)
        if isinstance(event, BlockRemoved) and event.medium == "CPU":
            self.removed.append(event)
        if isinstance(event, BlockStored):
            self.blocks[event.medium or ""].update(dict.fromkeys(event.block_hashes, event))
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                self.blocks[event.medium or ""].pop(block_hash, None)
        else:
            self.blocks["GPU"].clear()


@pytest.fixture
def endpoint(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/events"


@pytest.fixture
def subscriber(endpoint: str) -> Iterator[Subscriber]:
    listening = Subscriber(endpoint)
    yield listening
    listening.close()


def _with_events(endpoint: str) -> dict[str, Any]:
    return {
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    }


@pytest.mark.vllm
def test_a_subscriber_hears_of_what_is_stored_and_of_what_goes(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    endpoint: str,
    subscriber: Subscriber,
) -> None:
    engine = start_engine(more=_with_events(endpoint))
    subscriber.wait_until_connected(engine, make_prompt(BLOCK + 1))
    prompt = make_prompt(4 * CHUNK + 77)
    assert engine.answer(prompt).tokens == reference(prompt)
    subscriber.read()
    assert [event.token_ids for event in subscriber.stored] == [
        prompt[start : start + CHUNK] for start in range(0, 4 * CHUNK, CHUNK)
    ]
    parent = None
    for event in subscriber.stored:
        assert (event.block_size, len(event.block_hashes)) == (BLOCK, CHUNK // BLOCK)
        assert (event.parent_block_hash, event.medium, event.lora_name) == (parent, "CPU", None)
        assert event.kv_cache_spec_kind == "full_attention"
        parent = event.block_hashes[-1]
    # The same blocks that vLLM announced for the GPU, under the same hashes.
    assert subscriber.blocks["CPU"].keys() <= subscriber.blocks["GPU"].keys()

    engine.forget_gpu()
    again = engine.answer(prompt)
    assert again.cached_tokens == 4 * CHUNK
    subscriber.read()
    assert (len(subscriber.stored), subscriber.removed) == (4, [])

    engine.forget_all()
    engine.answer(make_prompt(20))
    subscriber.read()
    assert subscriber.blocks["CPU"] == {}
    assert len(subscriber.removed) == 4
    engine.check_clean()


@pytest.mark.vllm
def test_evictions_are_announced_and_a_salted_prompt_names_its_salt(
    start_engine: StartEngine, make_prompt: MakePrompt, endpoint: str, subscriber: Subscriber
) -> None:
    # Six chunks fit.
    engine = start_engine({"tiers": {"cpu": {"capacity": "3Mi"}}}, more=_with_events(endpoint))
    subscriber.wait_until_connected(engine, make_prompt(BLOCK + 1))
    salted = make_prompt(2 * CHUNK + 9)
    engine.answer({"prompt_token_ids": salted, "cache_salt": "tenant a"})
    prompts = [make_prompt(1100) for _ in range(3)]
    for prompt in (*prompts, prompts[1]):
        engine.answer(prompt)
    engine.answer(make_prompt(5))
    subscriber.read()
    assert [keys[0] for keys in subscriber.stored[0].extra_keys or () if keys] == ["tenant a"]
    assert subscriber.removed
    side = engine.worker._worker
    assert side is not None
    held = {key.chunk_hash for key in side.engine.storage.cpu._index}
    believed = set()
    for prompt in (salted, *prompts):
        chain = PrefixChain(CHUNK, chain_secret(""), chain_root("", "tenant a" if prompt is salted else ""))
        chain.extend(prompt)
        for index in range(chain.num_chunks):
            tokens = prompt[index * CHUNK : (index + 1) * CHUNK]
            if any(event.token_ids == tokens for event in subscriber.blocks["CPU"].values()):
                believed.add(bytes(chain.digests[index * 16 : index * 16 + 16]))
    assert believed == held


@pytest.mark.vllm
def test_blocks_on_a_disk_have_a_medium_of_their_own(
    start_engine: StartEngine, make_prompt: MakePrompt, endpoint: str, subscriber: Subscriber, tmp_path: Path
) -> None:
    disk = {"directories": [str(tmp_path)], "capacity": "64Mi"}
    extra = {"tiers": {"cpu": {"capacity": "64Mi"}, "disk": disk}}
    engine = start_engine(extra, more=_with_events(endpoint))
    subscriber.wait_until_connected(engine, make_prompt(BLOCK + 1))
    engine.answer(make_prompt(3 * CHUNK + 20))
    assert eventually(lambda: [tier.objects for tier in engine.rank_stats.tiers] == [3, 3])
    engine.answer(make_prompt(5))
    subscriber.read()
    assert subscriber.blocks["STORAGE"].keys() == subscriber.blocks["CPU"].keys()
    assert len(subscriber.blocks["CPU"]) == 3 * CHUNK // BLOCK
    engine.forget_all()
    assert eventually(lambda: [tier.objects for tier in engine.rank_stats.tiers] == [0, 0])
    engine.answer(make_prompt(5))
    subscriber.read()
    assert subscriber.blocks["STORAGE"] == subscriber.blocks["CPU"] == {}


@pytest.mark.vllm
def test_without_vllms_switch_nothing_is_kept(start_engine: StartEngine, make_prompt: MakePrompt) -> None:
    engine = start_engine()
    engine.answer(make_prompt(3 * CHUNK))
    assert engine.scheduler.take_events() == ()
    assert engine.worker._manager is not None
    assert engine.worker._manager.changes is None


# The announcer alone


def _request(length: int, size: int = 4) -> Any:
    dice = random.Random(length)
    return SimpleNamespace(
        all_token_ids=[dice.randrange(1000) for _ in range(length)],
        block_hashes=[dice.randbytes(32) for _ in range(length // size)],
        lora_request=None,
        mm_features=None,
        cache_salt=None,
        prompt_embeds=None,
    )


def _named(block_hashes: list[bytes]) -> list[Any]:
    """As vLLM's events name them: by 64 bits, unless told otherwise."""
    return [maybe_convert_block_hash(block_hash) for block_hash in block_hashes]


def _digests(count: int) -> list[bytes]:
    return [random.randbytes(16) for _ in range(count)]


def _report(rank: int, *changes: tuple[str, bytes, bool]) -> tuple[int, Changes]:
    return rank, Changes([Change(*change) for change in changes])


def test_a_chunk_counts_once_all_ranks_have_it() -> None:
    events = KVEvents(chunk_size=16, hash_block_size=4, ranks=3, spec_kind=None)
    request, (digest,) = _request(16), _digests(1)
    events.describe(request, 0, 16, digest)
    events.observe([_report(0, ("cpu", digest, True)), _report(2, ("cpu", digest, True))])
    events.observe([_report(0, ("cpu", digest, True))])
    assert events.take() == []
    events.observe([_report(1, ("cpu", digest, True))])
    (stored,) = events.take()
    assert (stored.block_hashes, stored.token_ids) == (_named(request.block_hashes), request.all_token_ids)
    events.observe([_report(1, ("cpu", digest, False)), _report(0, ("cpu", digest, False))])
    (removed,) = events.take()
    assert (removed.block_hashes, removed.medium) == (_named(request.block_hashes), "CPU")
    # Gone on two of three: one of them having it again is not enough.
    events.observe([_report(0, ("cpu", digest, True))])
    assert events.take() == []
    events.observe([_report(1, ("cpu", digest, True))])
    assert [type(event) for event in events.take()] == [BlockStored]


def test_each_medium_is_announced_by_itself() -> None:
    events = KVEvents(chunk_size=8, hash_block_size=8, ranks=1, spec_kind=None)
    (digest,) = _digests(1)
    events.observe([_report(0, ("disk", digest, True))])
    assert events.take() == []
    # Found on a disk from an earlier life: a name comes with the first request that looks it up.
    events.describe(_request(8, size=8), 0, 8, digest)
    events.observe([_report(0, ("cpu", digest, True), ("remote", digest, True), ("disk", digest, False))])
    assert [(type(event).__name__, event.medium) for event in events.take()] == [
        ("BlockStored", "STORAGE"),
        ("BlockStored", "CPU"),
    ]
    events.observe([_report(0, ("remote", digest, False))])
    assert [(type(event).__name__, event.medium) for event in events.take()] == [("BlockRemoved", "STORAGE")]


def test_a_partial_chunk_has_its_own_tokens() -> None:
    events = KVEvents(chunk_size=16, hash_block_size=4, ranks=1, spec_kind=None)
    request, digests = _request(45), _digests(3)
    events.describe(request, 0, 44, b"".join(digests))
    events.observe([_report(0, *(("cpu", digest, True) for digest in digests))])
    stored = events.take()
    assert [len(event.token_ids) for event in stored] == [16, 16, 12]
    assert [token for event in stored for token in event.token_ids] == request.all_token_ids[:44]
    assert [event.parent_block_hash for event in stored[1:]] == _named(request.block_hashes)[3:8:4]


def test_what_is_forgotten_is_retracted_before() -> None:
    events = KVEvents(chunk_size=4, hash_block_size=4, ranks=1, spec_kind=None, limit=3)
    requests, digests = [_request(4 + index * 4) for index in range(5)], _digests(5)
    for index, digest in enumerate(digests):
        events.describe(requests[index], 4 * index, 4 * index + 4, digest)
        events.observe([_report(0, ("cpu", digest, True))])
    seen = events.take()
    believed: set[Any] = set()
    for event in seen:
        if isinstance(event, BlockStored):
            believed.update(event.block_hashes)
        else:
            believed.difference_update(event.block_hashes)
    assert believed == {_named(requests[index].block_hashes)[index] for index in (2, 3, 4)}
    events.observe([(0, Changes([Change("cpu", digests[4], False)], lost=True))])
    assert sorted(event.block_hashes[0] for event in events.take()) == sorted(believed)


def test_a_log_that_nobody_reads_stays_small() -> None:
    log = ChangeLog(limit=10)
    keys = [CacheEngineKey(digest, bytes(16), 0) for digest in _digests(25)]
    for key in keys:
        log.add("cpu", key, True)
    changes = log.take()
    assert changes is not None
    assert changes.lost
    assert changes.changes == [Change("cpu", key.chunk_hash, True) for key in keys[20:]]
    assert log.take() is None
    log.add("cpu", keys[0], False)
    assert log.take() == Changes([Change("cpu", keys[0].chunk_hash, False)])
