# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler's and the workers' side of the connector.

vLLM broadcasts the metadata to all ranks with every step, so it names only the window of a request that is
loaded or stored in that step: the digests of its chunks and its blocks, not the token ids and slots of the
whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvcache import _native
from kvcache.storage.changes import Changes
from kvcache.storage.tier import NO_PARENT, NO_TENANT


@dataclass
class LoadSpec:
    """What of a request's prompt is given back."""

    vllm_cached_tokens: int
    """Tokens that vLLM has in its own pages: those are never written."""
    lmcache_cached_tokens: int
    """Tokens, from the prompt's start, whose KV the cache has."""
    can_load: bool
    """vLLM has allocated the blocks."""
    lookup_id: str = ""
    """Owner of the lease on what is loaded."""
    load_async: bool = False
    """The request waits outside of the batch until the load is reported as finished."""


@dataclass
class SaveSpec:
    """What of a request's tokens is stored."""

    skip_leading_tokens: int
    """Tokens, from the prompt's start, that are stored already; a whole number of chunks."""
    can_save: bool
    save_id: int = 0
    """Names this save in the workers' acknowledgements."""


@dataclass
class ReqMeta:
    """One request in one step: the window `[first_token, num_tokens)` of its sequence.

    `load_spec` and `save_spec` count tokens from the sequence's start.
    """

    req_id: str
    first_token: int
    """Where the window begins: a multiple of the chunk size and of the block size."""
    num_tokens: int
    """Where it ends."""
    digests: bytes
    """16 bytes for each chunk of the window."""
    block_ids: list[int]
    """vLLM's blocks of the window, in order."""
    load_spec: LoadSpec | None = None
    save_spec: SaveSpec | None = None
    tenant: bytes = NO_TENANT
    """16 bytes, whose request it is."""
    parent: bytes = NO_PARENT
    """16 bytes: digest of the chunk before the window."""

    @property
    def lookup_id(self) -> str:
        """Of what is loaded; empty where nothing is."""
        return "" if self.load_spec is None else self.load_spec.lookup_id

    def slots(self, block_size: int, first: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """int64 [tokens of the window]: `block_id * block_size + offset`, and -1 outside of `[first, end)`.

        Raises:
            ValueError: a block's id that is none, or fewer blocks than the window has tokens for.
        """
        tokens = self.num_tokens - self.first_token
        return _native.slots_of(self.block_ids, block_size, tokens, first, tokens if end is None else end)

    def promised_blocks(self, block_size: int, first_missing: int = 0) -> list[int]:
        """Blocks with a token that is to be loaded, from window position `first_missing` on."""
        spec = self.load_spec
        if spec is None or not spec.can_load:
            return []
        first = max(first_missing, spec.vllm_cached_tokens - self.first_token)
        last = spec.lmcache_cached_tokens - self.first_token
        return self.block_ids[first // block_size : -(-last // block_size)]


@dataclass
class LMCacheConnectorMetadata(KVConnectorMetadata):
    """One step's work, from the scheduler to every rank."""

    lookup_session: str
    """The session of the scheduler's lookups: the ranks hold their leases under it."""
    step: int = 0
    """Counts the scheduler's steps, from 1 on."""
    heard: int = 0
    """The last step that may have said of an asynchronous load that it is ready, as the scheduler knows."""
    requests: list[ReqMeta] = field(default_factory=list)
    lookup_requests_in_step: list[str] = field(default_factory=list)
    """Lookups whose leases end with this step although nothing is loaded for them."""
    lost_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Lookup to blocks whose KV was promised to vLLM and will not come, since planning the step failed."""
    lost_async: list[str] = field(default_factory=list)
    """Those of them that wait outside of the batch for the end of their load."""
    others_loads: list[str] = field(default_factory=list)
    """What another connector loads in this step: the ranks say when the step is over."""
    held_requests: list[str] = field(default_factory=list)
    """Finished requests whose blocks stay until their stores are done."""
    blocks_were_taken: bool = False
    """A request was preempted: its blocks may be overwritten by this step."""


@dataclass
class LMCacheWorkerMetadata(KVConnectorWorkerMetadata):
    """What a rank has done since its last report, back to the scheduler."""

    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Save to tokens, from the request's start, that are stored without a gap, and to the ranks that say
    so."""
    finished_loads: dict[str, int] = field(default_factory=dict)
    """Lookup to tokens that were promised and did not come: 0 where all is well."""
    others_loads: set[str] = field(default_factory=set)
    """Of other connectors, that were in the steps reported here."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    """What finished loads moved, and how long they took."""
    changes: list[tuple[int, Changes]] = field(default_factory=list)
    """Rank and what its tiers took in and gave up, if KV events are wanted."""

    def aggregate(self, other: LMCacheWorkerMetadata) -> LMCacheWorkerMetadata:
        """Over ranks: the least that one has saved, and the most that one missed."""
        saves = dict(self.saves)
        for save_id, (tokens, ranks) in other.saves.items():
            least, before = saves.get(save_id, (tokens, 0))
            saves[save_id] = (min(least, tokens), before + ranks)
        finished = dict(self.finished_loads)
        for req_id, tokens in other.finished_loads.items():
            finished[req_id] = max(finished.get(req_id, 0), tokens)
        return LMCacheWorkerMetadata(
            saves,
            finished,
            self.others_loads | other.others_loads,
            self.load_bytes + other.load_bytes,
            self.load_seconds + other.load_seconds,
            self.changes + other.changes,
        )

    def __bool__(self) -> bool:
        return bool(self.saves or self.finished_loads or self.others_loads or self.load_bytes or self.changes)


@dataclass
class StepReport:
    """What a worker has to tell the scheduler; taken by vLLM piece by piece at the end of each step."""

    invalid_block_ids: set[int] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    """Requests whose asynchronous load has ended, well or not, or of which all copies are queued; each is
    reported exactly once."""
    finished_sending: set[str] = field(default_factory=set)
    """Requests whose blocks were held and are not read any more; each is reported exactly once."""
    worker: LMCacheWorkerMetadata = field(default_factory=LMCacheWorkerMetadata)

    def decline(self, metadata: LMCacheConnectorMetadata) -> None:
        """A rank without a cache stores nothing, and nothing waits for it."""
        for request in metadata.requests:
            if request.save_spec is not None:
                self.worker.saves[request.save_spec.save_id] = (0, 1)
        self.finished_sending.update(metadata.held_requests)

    def lose(self, lookup_id: str, tokens: int, block_ids: Iterable[int]) -> None:
        """Tokens that were promised of a lookup did not come, nor did anything else in these blocks."""
        self.invalid_block_ids.update(block_ids)
        self.worker.finished_loads[lookup_id] = tokens

    def take_invalid_block_ids(self) -> set[int]:
        taken, self.invalid_block_ids = self.invalid_block_ids, set()
        return taken

    def take_finished_recving(self) -> set[str]:
        taken, self.finished_recving = self.finished_recving, set()
        return taken

    def take_finished_sending(self) -> set[str]:
        taken, self.finished_sending = self.finished_sending, set()
        return taken

    def take_worker_metadata(self) -> LMCacheWorkerMetadata | None:
        """None where there is nothing to tell."""
        if not self.worker:
            return None
        taken, self.worker = self.worker, LMCacheWorkerMetadata()
        return taken
