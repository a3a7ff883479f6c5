# SPDX-License-Identifier: Apache-2.0
"""What the scheduler remembers of a request between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache.integration.vllm.counters import Sources
from kvcache.integration.vllm.metadata import LoadSpec
from kvcache.integration.vllm.switches import NONE, Switches
from kvcache.storage.tier import NO_TENANT
from kvcache.tokens.hashing import PrefixChain

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestTracker:
    """One request. Token counts are from the sequence's start."""

    request: Request
    chain: PrefixChain | None
    """None where the prompt cannot be named by token ids: nothing is looked up or stored."""
    tenant: bytes = NO_TENANT
    switches: Switches = NONE
    """What its client said."""
    hit_tokens: int | None = None
    """Answer of the lookup; None before it, and again after preemption; 0 once nothing is leased any more."""
    hit_from: int = 0
    """Tokens that vLLM had itself when it was made: what lies before them need not be there."""
    sources: Sources = ()
    """Where those tokens come from."""
    waits_until: float | None = None
    """The lookup waits for slower tiers, until then at the latest; None if it does not."""
    waited_s: float = 0.0
    """What its lookups have waited before: all of them together wait one deadline at most."""
    ask_again_at: float = 0.0
    """When half of the lease's time is over."""
    load_spec: LoadSpec | None = None
    block_ids: list[int] = field(default_factory=list)
    preemptions: int = 0
    """How often it was preempted, as far as known here."""
    computed_tokens: int = 0
    """Before the last step that it was in."""
    asked_tokens: int = 0
    """Found by the lookup, or asked of the workers to be stored."""
    open_saves: set[int] = field(default_factory=set)
    """Saves that read the request's blocks and are not acknowledged by all workers."""
    hole: bool = False
    """A store was not acknowledged in full: nothing behind the gap is stored until the request starts
    over."""
    local_tokens: int | None = None
    """Tokens that vLLM had itself when it asked last; None once a load was promised or it was scheduled."""
    own_tokens: int | None = None
    """Tokens that vLLM had itself when a load was promised for the first time; None if none was."""
    loading: str | None = None
    """Lookup whose load the request did not wait for and whose outcome is open; None if there is none."""
    scheduled: bool = False
    """It has been in a step."""

    @property
    def req_id(self) -> str:
        return str(self.request.request_id)

    @property
    def lookup_id(self) -> str:
        """Another one after each preemption, so that what ends one lookup's lease does not end the next
        one's."""
        return f"{self.preemptions}/{self.request.request_id}"


def request_of(lookup_id: str) -> str:
    """The id of the request that a lookup was made for."""
    return lookup_id.partition("/")[2]
