# SPDX-License-Identifier: Apache-2.0
"""Whatever changes the KV of equal tokens changes the keys, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvcache.integration.vllm.identity import namespace_of, naming_rank, request_adapter, request_inserts
from kvcache.tokens.database import ChunkedTokenDatabase, chain_root
from kvcache.tokens.keys import Namespace

_OTHER_PROCESS = """
import sys
from pathlib import Path
from tests.integration.vllm.test_identity import digest_of
print(digest_of(Path(sys.argv[1])).hex())
"""


def digest_of(
    model: Path,
    chunk_size: int = 256,
    spec: dict[str, Any] | None = None,
    *,
    coded: bool = False,
    **more: Any,
) -> bytes:
    """The namespace of rank 0 of a vLLM."""
    config = EngineArgs(
        model=str(model), **{"dtype": "float32", "enforce_eager": True, **more}
    ).create_engine_config()
    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **(spec or {})}
    groups = [KVCacheGroupSpec(["layer0", "layer1"], FullAttentionSpec(**shape))]
    pages = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return namespace_of(config, pages, chunk_size, coded=coded).digest()


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    """The same model elsewhere, in a folder of the same name."""
    return Path(shutil.copytree(tiny_model, tmp_path / "elsewhere" / tiny_model.name))


def _rewrite(model: Path, **changes: Any) -> Path:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return model


def test_copies_share_and_so_does_every_process(tiny_model: Path, copied: Path) -> None:
    here = digest_of(tiny_model)
    assert digest_of(copied) == here
    assert digest_of(copied, max_model_len=128, max_num_seqs=3, gpu_memory_utilization=0.5) == here
    other = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(copied)],
        env=os.environ | {"PYTHONHASHSEED": "77", "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == here.hex()


def test_each_difference_in_configuration_keeps_apart(tiny_model: Path) -> None:
    fp8 = {"dtype": torch.uint8}
    digests = [
        digest_of(tiny_model),
        digest_of(tiny_model, dtype="bfloat16", spec={"dtype": torch.bfloat16}),
        digest_of(tiny_model, dtype="bfloat16", spec={"dtype": torch.bfloat16}, coded=True),
        digest_of(tiny_model, kv_cache_dtype="fp8", spec=fp8),
        digest_of(tiny_model, revision="v2"),
        digest_of(tiny_model, chunk_size=512),
        digest_of(tiny_model, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        digest_of(tiny_model, hf_overrides={"rms_norm_eps": 1e-3}),
        digest_of(tiny_model, tensor_parallel_size=2, spec={"num_kv_heads": 1}),
        digest_of(tiny_model, pipeline_parallel_size=2),
        digest_of(tiny_model, block_size=64, spec={"block_size": 64}),
    ]
    assert len(set(digests)) == len(digests)


def test_other_weights_keep_apart(tiny_model: Path, copied: Path) -> None:
    (weights,) = copied.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digest_of(copied) != digest_of(tiny_model)


def test_another_configuration_of_the_model_keeps_apart(tiny_model: Path, copied: Path) -> None:
    before = digest_of(tiny_model)
    assert digest_of(_rewrite(copied, rope_theta=123.0)) != before


# Requests


def _lora(tmp_path: Path, place: str, weights: bytes) -> LoRARequest:
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest("adapter", 1, str(folder))


def test_adapters_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    def root(lora: LoRARequest | None) -> bytes:
        return chain_root(request_adapter(SimpleNamespace(lora_request=lora)))

    first = root(_lora(tmp_path, "a", b"weights 1"))
    assert root(_lora(tmp_path, "b", b"weights 1")) == first
    assert len({root(None), first, root(_lora(tmp_path, "a", b"weights 2"))}) == 3
    assert len({root(LoRARequest("x", 1, "org/x")), root(LoRARequest("x", 2, "org/x"))}) == 2


def test_images_are_told_apart_by_their_whole_hash_and_place() -> None:
    def digests(*features: tuple[str, str, int, int]) -> bytes:
        described = [
            SimpleNamespace(
                modality=modality,
                identifier=identifier,
                mm_position=SimpleNamespace(offset=offset, length=length),
            )
            for modality, identifier, offset, length in features
        ]
        inserts = request_inserts(SimpleNamespace(mm_features=described or None))
        chain = ChunkedTokenDatabase(16, bytes(16), 0).chain(inserts=inserts)
        chain.extend([7] * 64)
        return bytes(chain.digests)

    long = "0123456789abcdef" * 4
    seen = [
        digests(),
        digests(("image", long + "a", 3, 20)),
        digests(("image", long + "b", 3, 20)),
        digests(("audio", long + "a", 3, 20)),
        digests(("image", long + "a", 4, 20)),
        digests(("image", long + "a", 3, 10), ("image", long + "a", 13, 10)),
    ]
    assert len({whole[-16:] for whole in seen}) == len(seen)
    assert digests(("image", long, 50, 5))[:48] == digests()[:48]


def test_with_mla_the_ranks_of_a_stage_share_their_name() -> None:
    assert [naming_rank(rank, 4, use_mla=True) for rank in range(8)] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert [naming_rank(rank, 4, use_mla=False) for rank in range(8)] == list(range(8))


_NAMESPACE = Namespace(
    model="m",
    revision="r",
    weights="w",
    architecture="a",
    dtype="torch.bfloat16",
    kv_dtype="auto",
    kv_scales="NONE",
    num_layers=2,
    num_kv_heads=4,
    head_size=64,
    chunk_size=16,
    tensor_parallel=1,
    pipeline_parallel=1,
    format_version=1,
)


def test_joined_rows_keep_apart_whatever_the_order_of_pages() -> None:
    ordered = [replace(_NAMESPACE, page_order=order) for order in ("", "x86_64 avx2", "x86_64 avx512")]
    digests = {one.digest() for one in ordered} | {one.with_joined_rows().digest() for one in ordered}
    assert len(digests) == 2 * len(ordered)


def test_keys_do_not_change_with_a_release_of_python_or_of_a_library() -> None:
    """Whoever changes them makes every stored object unreachable, and raises FORMAT_VERSION instead."""
    database = ChunkedTokenDatabase(16, _NAMESPACE.digest(), 3, "seed")
    chain = database.chain(adapter="ä", salt="tenant")
    chain.extend(range(33))
    assert _NAMESPACE.digest().hex() == "be0286394577490f058e31b0bb9b402d"
    assert bytes(chain.digests).hex() == "7c6d7e40b6504b1d9780d0be84333e41c7ea4d9302fee17e068554409581d0bf"
    assert (
        database.key(chain.tail_digest() or b"").to_bytes().hex()
        == "defdf5f5a780bedba0b7f9cc6bdc2712be0286394577490f058e31b0bb9b402d03000000"
    )
