# SPDX-License-Identifier: Apache-2.0
"""The engine over host pages: what was stored comes back, where it was asked for and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from kvcache import lmc_ops
from kvcache.engine import LMCacheEngine
from kvcache.gpu_connector import transfer
from kvcache.gpu_connector.feed import cut
from kvcache.gpu_connector.interface import Coded, Completion
from kvcache.gpu_connector.layerwise import VLLMPagedMemLayerwiseGPUConnector
from kvcache.gpu_connector.layout import LayerSpec, UnknownLayout
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.gpu_connector.xpu import VLLMGPUConnectorXPU
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.plans import Loaded
from kvcache.storage.manager import StorageManager
from kvcache.storage.policies import LRUPolicy
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.database import ChunkedTokenDatabase

CHUNK, BLOCK, BLOCKS, LAYERS, HEADS, HEAD = 16, 8, 32, 3, 2, 32


class Late(Completion):
    """Copies of a GPU that are done when the test says so."""

    def __init__(self) -> None:
        self.finished = False

    def done(self) -> bool:
        return self.finished


class LateConnector(VLLMPagedMemGPUConnectorV2):
    """Copies at once, as the stream's order makes it look, but reports it late."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.late: list[Late] = []

    def _delay(self) -> Late:
        self.late.append(Late())
        return self.late[-1]

    def batched_to_gpu(self, *args: object, **kwargs: object) -> Completion:
        super().batched_to_gpu(*args, **kwargs)  # type: ignore[arg-type]
        return self._delay()

    def batched_from_gpu(self, *args: object, **kwargs: object) -> Completion:
        super().batched_from_gpu(*args, **kwargs)  # type: ignore[arg-type]
        return self._delay()


@dataclass
class Rig:
    engine: LMCacheEngine
    pages: list[torch.Tensor]
    connector: VLLMPagedMemGPUConnectorV2
    spec: LayerSpec

    def slots(self, tokens: int) -> torch.Tensor:
        """A random block table."""
        blocks = torch.randperm(BLOCKS)[: -(-tokens // BLOCK)]
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)[:tokens]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[layers, tokens, 2, heads * head]: the KV of the slots, by plain indexing."""
        layers = [
            page.view(BLOCKS, HEADS, BLOCK, 2, HEAD)[slots // BLOCK, :, slots % BLOCK] for page in self.pages
        ]
        return torch.stack(layers).transpose(2, 3).reshape(LAYERS, len(slots), 2, HEADS * HEAD)

    def fill(self) -> None:
        for page in self.pages:
            page.copy_(torch.randn_like(page))

    def tier(self) -> CpuTier:
        return self.engine.storage.cpu


def make_rig(
    connector_type: type[VLLMPagedMemGPUConnectorV2] = VLLMPagedMemGPUConnectorV2,
    chunks: int = 20,
    *,
    dtype: torch.dtype = torch.float32,
    coded: bool = False,
) -> Rig:
    spec = LayerSpec(BLOCK, HEADS, HEAD, dtype, num_blocks=BLOCKS, coded=coded)
    pages = [torch.randn(BLOCKS, HEADS, BLOCK, 2 * HEAD).to(dtype) for _ in range(LAYERS)]
    connector = connector_type(spec)
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    shape = KVShape.of(connector, CHUNK)
    allocator = ChunkAllocator(
        HostRegion(chunks * -(-shape.chunk_bytes // 4096) * 4096, pin="Disabled"), shape
    )
    tier = CpuTier(allocator, LRUPolicy(8), lease_timeout_s=60.0)
    layered = None
    if not coded:
        layered = VLLMPagedMemLayerwiseGPUConnector(spec)
        layered.share_pages(connector)
    engine = LMCacheEngine(
        ChunkedTokenDatabase(CHUNK, bytes(16), 0), StorageManager(tier), connector, layered
    )
    return Rig(engine, pages, connector, spec)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = make_rig()
    yield rig
    assert rig.tier().stats().leases == 0
    rig.engine.close()


def mask(tokens: int, skipped: int) -> torch.Tensor:
    return torch.arange(tokens) >= skipped


def test_what_is_stored_comes_back_elsewhere(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (5 * CHUNK + 3,)).tolist()
    source, target = rig.slots(len(tokens)), rig.slots(len(tokens))
    expected = rig.read(source).clone()
    acknowledged: list[int] = []
    assert rig.engine.store(tokens, slot_mapping=source, on_stored=acknowledged.append) == 5 * CHUNK
    assert acknowledged == [5 * CHUNK]
    rig.fill()
    before = [page.clone() for page in rig.pages]
    there = rig.engine.retrieve(tokens, slot_mapping=target)
    assert there.tolist() == [True] * 5 * CHUNK + [False] * 3
    assert torch.equal(rig.read(target)[:, : 5 * CHUNK], expected[:, : 5 * CHUNK])
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[target[: 5 * CHUNK]] = False
    rest = untouched.nonzero().flatten()
    after = rig.read(rest)
    rig.pages[:] = before
    assert torch.equal(after, rig.read(rest))


def test_a_load_by_layer_brings_the_same(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (5 * CHUNK + 3,)).tolist()
    source, target = rig.slots(len(tokens)), rig.slots(len(tokens))
    expected = rig.read(source).clone()
    rig.engine.store(tokens, slot_mapping=source)
    rig.fill()
    there = rig.engine.retrieve(tokens, mask(len(tokens), CHUNK), slot_mapping=target, by_layer=True)
    for layer in range(LAYERS):
        rig.engine.order_layer(layer)
    assert there.tolist() == [False] * CHUNK + [True] * 4 * CHUNK + [False] * 3
    wanted = slice(CHUNK, 5 * CHUNK)
    assert torch.equal(rig.read(target)[:, wanted], expected[:, wanted])


def test_layer_by_layer_stores_and_brings_the_same(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (3 * CHUNK,)).tolist()
    source, target = rig.slots(len(tokens)), rig.slots(len(tokens))
    expected = rig.read(source).clone()
    acknowledged: list[int] = []
    storing = rig.engine.store_layer(tokens, slot_mapping=source, on_stored=acknowledged.append)
    assert len(list(storing)) == LAYERS + 1
    assert acknowledged == [3 * CHUNK]
    rig.fill()
    steps = list(rig.engine.retrieve_layer(tokens, slot_mapping=target))
    assert len(steps) == LAYERS + 2
    assert steps[1:-1] == [None] * LAYERS
    assert [step.tolist() for step in (steps[0], steps[-1]) if step is not None] == [[True] * len(tokens)] * 2
    assert torch.equal(rig.read(target), expected)


def test_a_load_that_is_closed_early_ends_its_lease(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (2 * CHUNK,)).tolist()
    rig.engine.store(tokens, slot_mapping=rig.slots(len(tokens)))
    for steps in range(1, LAYERS + 2):
        ended: list[Loaded] = []
        loading = rig.engine.retrieve_layer(
            tokens, slot_mapping=rig.slots(len(tokens)), on_loaded=ended.append
        )
        for _ in range(steps):
            next(loading)
        loading.close()
        assert len(ended) == 1
        assert rig.tier().stats().leases == 0


def test_masked_prefix_and_negative_slots_are_left_alone(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (4 * CHUNK,)).tolist()
    source, target = rig.slots(len(tokens)), rig.slots(len(tokens))
    expected = rig.read(source).clone()
    rig.engine.store(tokens, slot_mapping=source)
    rig.fill()
    before = rig.read(target).clone()
    slots = target.clone()
    slots[: CHUNK + 5] = -1
    slots[-1] = -1
    there = rig.engine.retrieve(tokens, mask(len(tokens), CHUNK), slot_mapping=slots)
    assert there.tolist() == [False] * CHUNK + [True] * 3 * CHUNK
    span = rig.engine.retrieve_span(tokens, mask(len(tokens), CHUNK), slot_mapping=slots.numpy())
    assert span == slice(CHUNK, 4 * CHUNK)
    with_own = mask(len(tokens), CHUNK + 3)  # a chunk of which a part is there already is read
    assert rig.engine.retrieve_span(tokens, with_own, slot_mapping=slots) == slice(CHUNK + 3, 4 * CHUNK)
    assert rig.engine.retrieve_span(tokens, mask(len(tokens), 9**9), slot_mapping=slots) == slice(0, 0)
    after = rig.read(target)
    assert torch.equal(after[:, : CHUNK + 5], before[:, : CHUNK + 5])
    assert torch.equal(after[:, CHUNK + 5 : -1], expected[:, CHUNK + 5 : -1])
    assert torch.equal(after[:, -1], before[:, -1])


def test_a_missing_chunk_ends_the_load_exactly_there(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (4 * CHUNK,)).tolist()
    slots = rig.slots(len(tokens))
    expected = rig.read(slots).clone()
    rig.engine.store(tokens[: 2 * CHUNK], slot_mapping=slots[: 2 * CHUNK])
    whole = rig.engine.database.hash_tokens(tokens)
    assert rig.engine.lookup(digests=whole) == 2 * CHUNK
    rig.fill()
    before = rig.read(slots).clone()
    there = rig.engine.retrieve(tokens, slot_mapping=slots)
    assert there.tolist() == [True] * 2 * CHUNK + [False] * 2 * CHUNK
    assert torch.equal(rig.read(slots)[:, : 2 * CHUNK], expected[:, : 2 * CHUNK])
    assert torch.equal(rig.read(slots)[:, 2 * CHUNK :], before[:, 2 * CHUNK :])


def test_stored_chunks_are_not_copied_again(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (3 * CHUNK,)).tolist()
    slots = rig.slots(len(tokens))
    rig.engine.store(tokens[:CHUNK], slot_mapping=slots[:CHUNK])
    assert rig.engine.store(tokens, slot_mapping=slots) == 3 * CHUNK
    assert rig.engine.counters.stored_tokens == 3 * CHUNK
    assert rig.engine.store(tokens, mask(len(tokens), CHUNK), slot_mapping=slots) == 3 * CHUNK
    assert rig.engine.counters.stored_tokens == 3 * CHUNK


def test_coded_rows_come_back_up_to_the_chunk_that_has_no_code() -> None:
    rig = make_rig(dtype=torch.bfloat16, coded=True)
    tokens = torch.randint(0, 1000, (4 * CHUNK,)).tolist()
    slots, other = rig.slots(len(tokens)), rig.slots(len(tokens))
    acknowledged: list[int] = []
    spread = torch.arange(-HEAD, HEAD).exp2().pow(9).to(torch.bfloat16)
    rig.pages[1][int(slots[2 * CHUNK + 3]) // BLOCK] = spread
    before, kept = rig.read(slots), [page.clone() for page in rig.pages]
    rig.engine.store(tokens[:CHUNK], slot_mapping=slots[:CHUNK], on_stored=acknowledged.append)
    rig.engine.store(tokens, mask(len(tokens), CHUNK), slot_mapping=slots, on_stored=acknowledged.append)
    assert acknowledged == [CHUNK, 2 * CHUNK]
    assert rig.engine.counters.failures == {"StoreNotCoded": 1}
    assert rig.engine.counters.stored_tokens == rig.engine.lookup(tokens) == 2 * CHUNK
    assert all(map(torch.equal, rig.pages, kept))
    # The chunk behind the refused one is not there either, and both can be stored later.
    rig.pages[1][int(slots[2 * CHUNK + 3]) // BLOCK] = 1.0
    rig.engine.store(tokens, slot_mapping=slots, on_stored=acknowledged.append)
    assert acknowledged[-1] == rig.engine.lookup(tokens) == 4 * CHUNK
    rig.fill()
    assert bool(rig.engine.retrieve(tokens, slot_mapping=other).all())
    assert torch.equal(rig.read(other)[:, : 2 * CHUNK], before[:, : 2 * CHUNK])
    assert rig.tier().stats().leases == 0
    rig.engine.close()


class LateCoded(LateConnector):
    """Says which chunks of a store had no code when the test does."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.refused: list[torch.Tensor] = []

    def batched_from_gpu(self, *args: object, **kwargs: object) -> Completion:
        late = super().batched_from_gpu(*args, **kwargs)
        self.refused.append(torch.zeros(2, dtype=torch.int32))
        return Coded(late, self.refused[-1])


def test_of_several_stores_the_refused_one_is_not_visible() -> None:
    rig = make_rig(LateCoded, dtype=torch.bfloat16, coded=True)
    assert isinstance(rig.connector, LateCoded)
    prompts = [torch.randint(0, 1000, (2 * CHUNK,)).tolist() for _ in range(3)]
    acknowledged: list[list[int]] = [[], [], []]
    for prompt, told in zip(prompts, acknowledged, strict=True):
        rig.engine.store(prompt, slot_mapping=rig.slots(2 * CHUNK), on_stored=told.append)
    rig.connector.refused[1][0] = 1
    for late in rig.connector.late:
        late.finished = True
    rig.engine.poll()
    assert acknowledged == [[2 * CHUNK], [0], [2 * CHUNK]]
    assert [rig.engine.lookup(prompt) for prompt in prompts] == [2 * CHUNK, 0, 2 * CHUNK]
    rig.engine.close()


def test_layers_of_coded_rows_are_not_stored_one_by_one() -> None:
    """Which chunks were refused is known of whole chunks alone."""
    rig = make_rig(dtype=torch.bfloat16, coded=True)
    layered = VLLMPagedMemLayerwiseGPUConnector(rig.spec)
    with pytest.raises(UnknownLayout, match="takes plain ones"):
        layered.share_pages(rig.connector)
    with pytest.raises(UnknownLayout, match="takes plain ones"):
        layered.initialize_kvcaches_ptr(kvcaches=rig.pages)
    with pytest.raises(UnknownLayout, match="moves plain rows"):
        VLLMGPUConnectorXPU(rig.spec).initialize_kvcaches_ptr(kvcaches=rig.pages)
    with pytest.raises(ValueError, match="hold coded rows"):
        lmc_ops.kv_transfer(
            torch.empty(0), rig.connector.transfer.pages, torch.empty(0, dtype=torch.int64), True
        )
    rig.engine.close()


def test_a_full_tier_acknowledges_what_fits() -> None:
    rig = make_rig(chunks=2)
    tokens = torch.randint(0, 1000, (4 * CHUNK,)).tolist()
    acknowledged: list[int] = []
    stored = rig.engine.store(tokens, slot_mapping=rig.slots(len(tokens)), on_stored=acknowledged.append)
    assert stored == acknowledged[0] == 2 * CHUNK
    assert rig.engine.counters.failures["StoreNoRoom"] == 1
    rig.engine.close()


def test_a_chunk_is_visible_only_when_its_copy_is_done() -> None:
    rig = make_rig(LateConnector)
    assert isinstance(rig.connector, LateConnector)
    tokens = torch.randint(0, 1000, (2 * CHUNK,)).tolist()
    slots = rig.slots(len(tokens))
    first: list[int] = []
    second: list[int] = []
    rig.engine.store(tokens, slot_mapping=slots, on_stored=first.append)
    rig.engine.store(tokens, slot_mapping=slots, on_stored=second.append)
    assert (first, second) == ([], [0])  # in flight by another is not stored yet
    assert rig.engine.lookup(tokens) == 0
    assert not rig.engine.drain(timeout_s=0.0)
    rig.connector.late[0].finished = True
    rig.engine.poll()
    assert first == [2 * CHUNK]
    assert rig.engine.lookup(tokens, lookup_id="request", pin=True) == 2 * CHUNK
    assert rig.tier().stats().leases == 2
    assert bool(rig.engine.retrieve(tokens, slot_mapping=slots, lookup_id="request").all())
    assert rig.tier().stats().leases == 2  # the copy still reads
    rig.connector.late[1].finished = True
    rig.engine.poll()
    assert rig.tier().stats().leases == 0
    rig.engine.close()


def test_a_failed_copy_leaves_nothing(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (2 * CHUNK,)).tolist()
    slots = rig.slots(len(tokens))
    beyond = slots.clone()
    beyond[3] = BLOCKS * BLOCK
    with pytest.raises(ValueError, match=str(BLOCKS * BLOCK)):
        rig.engine.store(tokens, slot_mapping=beyond)
    assert rig.tier().stats().used_bytes == 0
    rig.engine.store(tokens, slot_mapping=slots)
    before = rig.read(slots).clone()
    with pytest.raises(ValueError, match=str(BLOCKS * BLOCK)):
        rig.engine.retrieve(tokens, slot_mapping=beyond, lookup_id="request")
    assert torch.equal(rig.read(slots), before)
    assert rig.tier().stats().leases == 0


@pytest.mark.parametrize(
    ("tokens", "wrong_mask", "sentence"),
    [
        (40, mask(40, 5), "no multiple of the chunk size"),
        (40, torch.flip(mask(40, CHUNK), [0]), "True before False"),
        (40, mask(39, 0), "39 tokens for 40 slots"),
    ],
)
def test_a_mask_of_another_form_is_refused(
    rig: Rig, tokens: int, wrong_mask: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        rig.engine.store(list(range(tokens)), wrong_mask, slot_mapping=rig.slots(tokens))
    assert rig.tier().stats().used_bytes == 0


def test_neither_tokens_nor_digests(rig: Rig) -> None:
    with pytest.raises(ValueError, match="neither tokens nor digests"):
        rig.engine.store(slot_mapping=rig.slots(CHUNK))


def test_a_caller_that_fails_does_not_keep_the_others() -> None:
    rig = make_rig(LateConnector)
    assert isinstance(rig.connector, LateConnector)
    windows = [torch.randint(0, 1000, (CHUNK,)).tolist() for _ in range(3)]
    slots = rig.slots(CHUNK)
    acknowledged: list[int] = []

    def fail(tokens: int) -> None:
        raise RuntimeError("the caller's own")

    for window, on_stored in zip(windows, (fail, acknowledged.append, fail), strict=True):
        rig.engine.store(window, slot_mapping=slots, on_stored=on_stored)
    for late in rig.connector.late:
        late.finished = True
    rig.engine.poll()
    assert acknowledged == [CHUNK]
    assert rig.engine.counters.failures["RuntimeError"] == 2
    assert [rig.engine.lookup(window) for window in windows] == [CHUNK] * 3
    rig.engine.close()


def _wait(rig: Rig, ended: list[Loaded]) -> Loaded:
    """What the load beside the model comes to."""
    assert rig.engine.drain(timeout_s=30)
    (loaded,) = ended
    return loaded


def test_a_load_beside_the_model_fills_the_pages(rig: Rig) -> None:
    tokens = torch.randint(0, 1000, (5 * CHUNK + 3,)).tolist()
    source = rig.slots(len(tokens))
    expected = rig.read(source).clone()
    rig.engine.store(tokens, slot_mapping=source)
    rig.fill()
    target = rig.slots(len(tokens))
    before = rig.read(target).clone()
    rig.engine.lookup(tokens, lookup_id="request", pin=True)
    ready: list[Loaded] = []
    ended: list[Loaded] = []
    rig.engine.retrieve_beside(
        tokens,
        mask(len(tokens), CHUNK),
        slot_mapping=target,
        lookup_id="request",
        on_ready=ready.append,
        on_loaded=ended.append,
    )
    loaded = _wait(rig, ended)
    there = (torch.arange(len(tokens)) >= CHUNK) & (torch.arange(len(tokens)) < 5 * CHUNK)
    assert torch.equal(loaded.there, there)
    assert (loaded.error, loaded.num_bytes > 0) == (None, True)
    assert torch.equal(rig.read(target), torch.where(there[None, :, None, None], expected, before))
    assert rig.engine.counters.loaded_tokens == 4 * CHUNK
    assert [torch.equal(told.there, there) for told in ready] == [True]


def test_a_load_beside_the_model_that_breaks_off_says_what_came(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, 1000, (5 * CHUNK,)).tolist()
    source = rig.slots(len(tokens))
    expected = rig.read(source).clone()
    rig.engine.store(tokens, slot_mapping=source)
    rig.fill()
    monkeypatch.setattr(transfer, "cut", partial(cut, slice_bytes=1))
    queue, calls = transfer.PageTransfer._queue_copies, itertools.count()

    def break_off(*arguments: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("the device says no")
        queue(*arguments)

    monkeypatch.setattr(transfer.PageTransfer, "_queue_copies", break_off)
    ready: list[Loaded] = []
    ended: list[Loaded] = []
    rig.engine.retrieve_beside(tokens, slot_mapping=source, on_ready=ready.append, on_loaded=ended.append)
    loaded = _wait(rig, ended)
    assert ready == [loaded]
    assert torch.equal(loaded.there, torch.arange(len(tokens)) < 2 * CHUNK)
    assert "says no" in str(loaded.error)
    assert torch.equal(rig.read(source)[:, : 2 * CHUNK], expected[:, : 2 * CHUNK])
    assert rig.engine.counters.loaded_tokens == 2 * CHUNK


def test_a_load_beside_the_model_of_nothing_ends_at_once(rig: Rig) -> None:
    ended: list[Loaded] = []
    rig.engine.retrieve_beside(
        [1] * CHUNK, slot_mapping=rig.slots(CHUNK), on_ready=ended.append, on_loaded=ended.append
    )
    assert [(loaded.num_bytes, bool(loaded.there.any())) for loaded in ended] == [(0, False)] * 2


def test_a_load_beside_the_model_ends_with_the_engine() -> None:
    """Its end is heard of, and its memory is freed after it."""
    rig = make_rig()
    tokens = torch.randint(0, 1000, (5 * CHUNK,)).tolist()
    slots = rig.slots(len(tokens))
    rig.engine.store(tokens, slot_mapping=slots)
    ready: list[Loaded] = []
    ended: list[Loaded] = []
    rig.engine.retrieve_beside(tokens, slot_mapping=slots, on_ready=ready.append, on_loaded=ended.append)
    rig.engine.close()
    assert (len(ready), len(ended)) == (1, 1)
    assert rig.tier().stats().leases == 0
