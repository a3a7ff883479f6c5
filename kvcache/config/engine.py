# SPDX-License-Identifier: Apache-2.0
"""The one configuration model of the engine. Names follow LMCache's where it has one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvcache.config.base import ConfigError, Strict
from kvcache.config.tiers import TiersConfig


class LMCacheEngineConfig(Strict):
    """Everything the connector and the engine can be told. Names follow LMCache's where it has one."""

    chunk_size: int = Field(default=256, ge=16, le=4096)
    """Tokens that are stored and looked up as one; a power of two and a multiple of vLLM's block size."""
    use_layerwise: bool = False
    """Store each layer while the next ones are computed, not all of them after the step."""
    save_decode_cache: bool = False
    """Store the KV of generated tokens too."""
    save_unfull_chunk: bool = False
    """Store the last, partial chunk of a prompt too, in whole blocks of vLLM."""
    min_retrieve_tokens: int = Field(default=0, ge=0)
    """A hit of fewer tokens than this, or of fewer than 16 behind vLLM's own, is left to vLLM to compute."""
    skip_last_n_tokens: int = Field(default=0, ge=0)
    """Tokens at the end of a prompt that are neither looked up nor stored."""
    hash_seed: str = Field(default="", max_length=256)
    """Mixed into every key. Equal on all processes that share a tier; a secret value keeps others from
    crafting tokens whose keys collide."""
    async_loading: Literal["Auto", "Always", "Never"] = "Auto"
    """Whether a request waits for its load outside of the batch. `Auto`: where others would be held up by
    it."""
    compression: Literal["None", "Lossless"] = "None"
    """`Lossless`: bfloat16 KV takes some 0.81 of its bytes in all tiers and on the way there, and comes back
    bit for bit. KV of other types is stored as it is. Not with `use_layerwise`."""
    lookup_timeout_ms: int = Field(default=500, ge=1, le=60_000)
    """The longest that the scheduler waits for all ranks to answer; after it the answer is a miss."""
    lease_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """The longest that a chunk stays protected for a request that was never heard of again."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of the cache's own messages in vLLM's log."""
    allow_untested_vllm: bool = False
    """Cache also in a vLLM that is outside of the tested range of releases, at your own risk."""
    runtime_dir: str | None = Field(default=None, min_length=1, max_length=80)
    """Folder of the unix sockets (their whole path may have 107 bytes), shared with the admin sidecar. One
    engine a folder. Without it each engine makes one of its own below the system's temporary folder."""
    tiers: TiersConfig = TiersConfig()

    @model_validator(mode="after")
    def _compression_is_in_bulk(self) -> Self:
        if self.use_layerwise and self.compression != "None":
            raise ValueError(
                f"compression: {self.compression} needs a chunk's layers at once; leave use_layerwise off"
            )
        return self

    @field_validator("chunk_size")
    @classmethod
    def _chunk_is_power_of_two(cls, chunk_size: int) -> int:
        if chunk_size & (chunk_size - 1):
            raise ValueError(f"{chunk_size} is no power of two; take 256")
        return chunk_size

    def check_block_size(self, block_size: int) -> None:
        """Raises ConfigError unless a chunk is a whole number of vLLM's blocks of `block_size` tokens."""
        if self.chunk_size % block_size:
            raise ConfigError(
                f"chunk_size: {self.chunk_size} tokens are no multiple of vLLM's block size of {block_size} "
                f"tokens; set it to a multiple, or vLLM's --block-size to a divisor of {self.chunk_size}"
            )
