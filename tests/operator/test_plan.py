# SPDX-License-Identifier: Apache-2.0
"""Budgets, block sizes and the connector's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.config import load_config
from kvcache_operator.errors import ResourceError
from kvcache_operator.plan import MIB, make_plan
from kvcache_operator.render.containers import kv_transfer_config
from kvcache_operator.settings import Settings
from tests.operator.resources import resource

SETTINGS = Settings(image_cuda="cuda:1", image_cpu="cpu:1")


@given(
    capacity_mib=st.integers(256, 1 << 21),
    tensor=st.integers(1, 16),
    pipeline=st.integers(1, 16),
)
def test_the_ranks_share_the_capacity_of_a_replica(capacity_mib: int, tensor: int, pipeline: int) -> None:
    ranks = tensor * pipeline
    plan = make_plan(
        resource(
            cache__tiers__cpu__capacity=f"{capacity_mib}Mi",
            engine__tensorParallelSize=tensor,
            engine__pipelineParallelSize=pipeline,
        ),
        SETTINGS,
    )
    assert capacity_mib * MIB - ranks * MIB < plan.budget.tier_per_rank * ranks <= capacity_mib * MIB
    assert plan.config.tiers.cpu.capacity == plan.budget.tier_per_rank
    assert plan.budget.gpus == ranks
    # Whatever a pod may lock, share and keep fits below its limit.
    assert plan.budget.engine_limit is not None
    assert plan.budget.engine_limit > plan.budget.tier_per_rank * ranks + plan.budget.shm
    # More than the 64 MiB that kill workers, for each of them.
    assert plan.budget.shm > 64 * MIB * ranks


def test_a_gib_more_of_cache_is_a_gib_more_of_memory() -> None:
    small, large = (
        make_plan(resource(cache__tiers__cpu__capacity=size), SETTINGS) for size in ("4Gi", "5Gi")
    )
    assert large.budget.engine_request - small.budget.engine_request == 1 << 30


def test_what_waits_for_a_remote_tier_takes_no_memory_besides() -> None:
    """Writers read chunks where they lie in host memory; a client's own buffer and segment are memory of its
    own, in each rank."""
    remotes: list[dict[str, Any]] = [
        {"valkey": {"endpoints": ["v:1"]}},
        {"valkey": {"endpoints": ["v:1"]}, "writeQueue": "64Gi"},
        {"mooncake": {"master": "m:1", "metadataServer": "x", "buffer": "1Gi"}},
        {"mooncake": {"master": "m:1", "metadataServer": "x", "buffer": "1Gi", "segment": "4Gi"}},
    ]
    more = []
    for remote in remotes:
        without, plan = (
            make_plan(resource(engine__tensorParallelSize=2, **tiers), SETTINGS)
            for tiers in ({}, {"cache__tiers__remote": remote})
        )
        more.append((plan.budget.engine_request - without.budget.engine_request) >> 30)
    assert more == [0, 0, 2 * 1, 2 * (1 + 4)]


def test_the_cpu_has_its_own_kv_blocks_and_no_gpu() -> None:
    plan = make_plan(resource(engine__device="CPU", engine__cpuKvSpace="3Gi"), SETTINGS)
    less = make_plan(resource(engine__device="CPU", engine__cpuKvSpace="1Gi"), SETTINGS)
    assert plan.budget.gpus == 0
    assert plan.budget.engine_limit is None
    assert plan.budget.engine_request - less.budget.engine_request == 2 << 30
    assert plan.image == "cpu:1"


@pytest.mark.parametrize("space", ["512Mi", "1500Mi", "1G", "0Gi"])
def test_kv_space_is_whole_gibibytes(space: str) -> None:
    with pytest.raises(ResourceError, match=r"^spec\.engine\.cpuKvSpace: .* no whole number of gibibytes"):
        make_plan(resource(engine__device="CPU", engine__cpuKvSpace=space), SETTINGS)


@pytest.mark.parametrize(
    ("device", "args", "block_tokens"),
    [
        ("CUDA", [], 16),
        ("CPU", [], 128),
        ("CPU", ["--block-size", "32"], 32),
        ("CPU", ["--block_size=64"], 64),
        ("CUDA", ["--block-size=32", "--seed", "1", "--block-size", "128"], 128),
    ],
)
def test_block_size_is_read_as_vllm_reads_it(device: str, args: list[str], block_tokens: int) -> None:
    plan = make_plan(resource(engine__device=device, engine__args=args), SETTINGS)
    assert plan.block_tokens == block_tokens


@pytest.mark.parametrize("args", [["--block-size"], ["--block-size", "many"], ["--block-size=0"]])
def test_a_block_size_that_is_none(args: list[str]) -> None:
    with pytest.raises(ResourceError, match=r"^spec\.engine\.args\[0\]: --block-size has the value"):
        make_plan(resource(engine__args=args), SETTINGS)


def test_a_chunk_is_a_multiple_of_the_block() -> None:
    with pytest.raises(ResourceError) as caught:
        make_plan(resource(engine__device="CPU", cache__chunkTokens=64), SETTINGS)
    assert str(caught.value) == (
        "spec.cache.chunkTokens: 64 tokens are no multiple of the engine's block size of 128 tokens; "
        "write a multiple of it, or --block-size in spec.engine.args"
    )
    assert make_plan(resource(engine__device="CUDA", cache__chunkTokens=64), SETTINGS).block_tokens == 16


def test_problems_that_need_two_fields() -> None:
    with pytest.raises(ResourceError) as caught:
        make_plan(
            resource(
                model={"name": "/elsewhere/m", "volume": {"claimName": "c"}},
                engine__port=9000,
                admin__port=9000,
            ),
            SETTINGS,
        )
    assert [problem.path for problem in caught.value.problems] == ["spec.model.name", "spec.admin.port"]
    with pytest.raises(ResourceError, match=r"^spec\.model\.revision: a folder has no revisions"):
        make_plan(resource(model={"name": "/models/m", "revision": "main"}), SETTINGS)


@pytest.mark.parametrize("transfer", ["Whole", "Layerwise"])
@pytest.mark.parametrize("role", ["Both", "Producer", "Consumer"])
@pytest.mark.parametrize("tiers", ["cpu", "disk", "shared disk", "remote", "disk and remote"])
def test_each_way_of_transfer_goes_with_each_role_and_tier(transfer: str, role: str, tiers: str) -> None:
    values: dict[str, object] = {"cache__transfer": transfer, "cache__role": role}
    if "disk" in tiers:
        volume: dict[str, Any] = {"claimName": "c"} if "shared" in tiers else {"emptyDir": {}}
        values["cache__tiers__disk"] = {"capacity": "1Gi", "volume": volume}
    if "remote" in tiers:
        values["cache__tiers__remote"] = {"valkey": {"endpoints": ["v:1"]}}
    if role != "Both" and tiers in ("cpu", "disk"):
        with pytest.raises(ResourceError, match=r"^spec\.cache\.role: .* needs a tier that others share"):
            make_plan(resource(**values), SETTINGS)
        return
    plan = make_plan(resource(**values), SETTINGS)
    assert plan.config.use_layerwise is (transfer == "Layerwise")
    assert (plan.config.tiers.disk is not None) is ("disk" in tiers)
    assert (plan.config.tiers.remote is not None) is ("remote" in tiers)
    role_of_vllm = {"Both": "kv_both", "Producer": "kv_producer", "Consumer": "kv_consumer"}[role]
    assert json.loads(kv_transfer_config(plan))["kv_role"] == role_of_vllm


@given(
    chunk=st.sampled_from([16, 64, 256, 4096]),
    transfer=st.sampled_from(["Whole", "Layerwise"]),
    pinning=st.sampled_from(["Required", "Preferred", "Disabled"]),
    # Odd shares of three ranks: below nine digits a bare number of bytes would be refused.
    capacity=st.integers(256, 5000),
)
def test_the_connector_reads_back_what_was_planned(
    chunk: int, transfer: str, pinning: str, capacity: int
) -> None:
    import tempfile

    plan = make_plan(
        resource(
            cache__chunkTokens=chunk,
            cache__transfer=transfer,
            cache__tiers__cpu={"capacity": f"{capacity}Mi", "pinning": pinning},
            engine__tensorParallelSize=3,
        ),
        SETTINGS,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(plan.config_yaml)
        config = load_config({"config_file": str(file)}, environ={})
    assert config == plan.config
    assert (config.chunk_size, config.use_layerwise) == (chunk, transfer == "Layerwise")
    assert config.tiers.cpu.pinning == pinning
    assert config.tiers.cpu.capacity == capacity // 3 * MIB
