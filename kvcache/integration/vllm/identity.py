# SPDX-License-Identifier: Apache-2.0
"""Who may share KV: the namespace of a vLLM process and the root of a request's chain.

Everything that changes the KV of equal tokens must be read here, and a model, a configuration or a request
whose KV these keys would not tell apart is refused with a reason instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache.tokens.hashing import Insert
from kvcache.tokens.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_DRAFTLESS_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Ways of speculative decoding that keep no KV of their own."""


class UnsupportedError(RuntimeError):
    """Caching is off for this model or configuration. The text says which and why."""


def fingerprint_file(path: Path) -> bytes:
    """32 bytes from a file's size, its first 4 KiB and 16 samples of 4 KiB at even distances.

    Weights that were trained further differ almost everywhere, so samples tell files apart at a cost that
    does not grow with their size; copies of a file have one fingerprint, wherever and whenever they were
    made.
    """
    size = path.stat().st_size
    state = hashlib.sha256(struct.pack("<Q", size))
    with path.open("rb") as file:
        for sample in range(_SAMPLES + 1):
            file.seek(min(sample * size // _SAMPLES, max(0, size - _SAMPLE_BYTES)) if sample else 0)
            state.update(file.read(_SAMPLE_BYTES))
    return state.digest()


def fingerprint_folder(folder: Path) -> str:
    """Hex digest over the names and fingerprints of the weight and configuration files of a folder; empty if
    none."""
    suffixes = (".safetensors", ".bin", ".pt", ".gguf", ".json")
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
    if not files:
        return ""
    state = hashlib.sha256()
    for path in files:
        state.update(path.name.encode() + b"\0" + fingerprint_file(path))
    return state.hexdigest()[:32]


@lru_cache(maxsize=1024)
def _adapter_weights(path: str, changed_ns: int) -> str:
    """Fingerprint of an adapter's folder; asked again when the folder or a file in it changed."""
    return fingerprint_folder(Path(path))


def adapter_identity(name: str, int_id: int, path: str) -> str:
    """What a LoRA adapter is: its weights where they lie in a folder, else its name, path and number."""
    folder = Path(path)
    if folder.is_dir():
        changed = max(entry.stat().st_mtime_ns for entry in (folder, *folder.iterdir()))
        weights = _adapter_weights(path, changed)
        if weights:
            return json.dumps(["lora", name, weights])
    return json.dumps(["lora", name, path, int_id])


def request_adapter(request: Request) -> str:
    """The adapter part of the request's chain root; empty without an adapter."""
    lora = request.lora_request
    return "" if lora is None else adapter_identity(lora.lora_name, lora.lora_int_id, lora.lora_path)


def request_inserts(request: Request) -> list[Insert]:
    """The multi-modal items of a request at their positions, each by vLLM's full hash of it."""
    return [
        Insert(
            start=feature.mm_position.offset,
            end=feature.mm_position.offset + feature.mm_position.length,
            digest=f"{feature.modality}:{feature.identifier}".encode(),
        )
        for feature in request.mm_features or ()
    ]


def request_is_nameable(request: Request) -> bool:
    """False where token ids do not say what the prompt is: prompts given as embeddings."""
    return request.prompt_embeds is None


def _architecture(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    described: dict[str, Any] = {
        "hf_config": model.hf_config.to_dict(),
        "quantization": str(model.quantization),
        "hf_overrides": str(getattr(model, "hf_overrides", None)),
        "max_model_len_changes_rope": getattr(model, "rope_scaling", None),
        "draft": str(getattr(vllm_config.speculative_config, "method", None)),
    }
    # Where the folder lies and which library wrote the file say nothing about the KV.
    for name in ("_name_or_path", "transformers_version"):
        described["hf_config"].pop(name, None)
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _model_identity(vllm_config: VllmConfig) -> tuple[str, str, str]:
    """Name, revision and weights' fingerprint of the model."""
    model = vllm_config.model_config
    folder = Path(model.model)
    if folder.is_dir():
        weights = fingerprint_folder(folder)
        if not weights and vllm_config.load_config.load_format != "dummy":
            raise UnsupportedError(f"the model folder {folder} holds no weight files to tell apart")
        return folder.name, str(model.revision or ""), weights or "dummy"
    if not model.revision:
        # A name without a revision may mean other weights tomorrow: take the commit that the hub's cache
        # resolved.
        commit = getattr(model.hf_config, "_commit_hash", None)
        if not commit:
            raise UnsupportedError(
                f"model {model.model} has no revision and its configuration names none; set --revision, so "
                "that KV of other weights is never taken for its own"
            )
        return model.model, str(commit), ""
    return model.model, str(model.revision), ""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedError, with the reason, for what these keys or one chunk layout cannot cover."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise UnsupportedError(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}); one group is supported"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise UnsupportedError(
            f"the model's KV cache is a {kind}; FullAttentionSpec and MLAAttentionSpec are supported"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedError(
            "the model's attention is not causal: the KV of a prefix depends on what follows it"
        )
    if kind == "FullAttentionSpec" and getattr(spec, "head_size_v", None) not in (None, spec.head_size):
        raise UnsupportedError(
            f"values have heads of {spec.head_size_v}, keys of {spec.head_size}; equal ones are supported"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedError(f"one stored state covers {spec.tokens_per_state} tokens; one is supported")
    if getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") not in ("NONE", "FP8_PER_TENSOR"):
        raise UnsupportedError(f"the KV is quantised as {spec.kv_quant_mode.name}, with scales in its pages")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales makes the KV's scales anew in each process; give them with the checkpoint"
        )
    parallel = vllm_config.parallel_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise UnsupportedError("context parallelism spreads one sequence's KV over ranks")
    speculative = vllm_config.speculative_config
    if speculative is not None and parallel.pipeline_parallel_size > 1:
        # vLLM ends the step of a stage that does not sample without telling the connector.
        raise UnsupportedError(
            "speculative decoding beside pipeline parallelism; one of the two is supported"
        )
    if speculative is not None and speculative.method not in _DRAFTLESS_METHODS:
        raise UnsupportedError(
            f"speculative decoding by {speculative.method} keeps KV of a draft model; ngram is supported"
        )


def _page_order(vllm_config: VllmConfig, block_size: int) -> str:
    """vLLM's attention on the CPU lays the keys and values of a page out as its instructions want them."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {has_amx} {block_size}"


def namespace_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_size: int, *, coded: bool = False
) -> Namespace:
    """The namespace of one rank. Raises UnsupportedError where the weights cannot be told apart.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: vLLM's.
        chunk_size: tokens of a chunk.
        coded: chunks hold coded rows.
    """
    name, revision, weights = _model_identity(vllm_config)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return Namespace(
        model=name,
        revision=revision,
        weights=weights,
        architecture=_architecture(vllm_config),
        dtype=str(vllm_config.model_config.dtype),
        kv_dtype=f"{cache.cache_dtype}/{spec.dtype}" + "/coded rows 2" * coded,
        kv_scales=str(getattr(spec.kv_quant_mode, "name", "NONE")) if hasattr(spec, "kv_quant_mode") else "",
        num_layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        chunk_size=chunk_size,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        page_order=_page_order(vllm_config, spec.block_size),
    )


def naming_rank(rank: int, tensor_parallel: int, *, use_mla: bool) -> int:
    """The rank that a rank's chunks are named by. With MLA all tensor-parallel ranks of a stage hold the same
    bytes: they share the name of the first, which alone writes them to the tiers below host memory."""
    return rank - rank % tensor_parallel if use_mla else rank


def default_runtime_dir(engine_id: str) -> Path:
    """The folder of an engine's sockets where none is configured: one for all its processes."""
    tag = hashlib.sha256(engine_id.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"kvcache-{os.getuid()}-{tag}"
