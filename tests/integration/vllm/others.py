# SPDX-License-Identifier: Apache-2.0
"""Another connector beside ours: it promises tokens that never come, as one whose peer is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from tests.integration.vllm.engines import BLOCK


@dataclass
class _Lost(KVConnectorMetadata):  # type: ignore[misc]
    blocks: list[int] = field(default_factory=list)


class BrokenPromises(KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps none of its `promises`: tokens that the next requests are said to have, each once."""

    promises: ClassVar[list[int]] = []
    broken = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._lost: list[int] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (self.promises[0] - num_computed_tokens if self.promises else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tokens = type(self).promises.pop(0)
            self._lost = blocks.get_block_ids()[0][(tokens - num_external_tokens) // BLOCK : tokens // BLOCK]

    def build_connector_meta(self, scheduler_output: Any) -> _Lost:
        lost, self._lost = self._lost, []
        return _Lost(lost)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Lost)
        self._lost.extend(metadata.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, []
        type(self).broken += bool(lost)
        return set(lost)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
